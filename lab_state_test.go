package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

const labData = "/home/toad/.local/share/toad"

// ownData gives Toad an empty data directory on a small file system of its own; the test's end puts the
// other one back. Services are enrolled after it, so that their records are on it alone.
func (l *lab) ownData(t *testing.T, size string) {
	t.Helper()
	t.Cleanup(func() {
		l.try("sh", "-c", "systemctl --user stop toad.service")
		l.try("--root", "sh", "-c", "umount -l "+labData)
		if out, status := l.try("sh", "-c", "systemctl --user start toad.service"); status != 0 {
			t.Errorf("Toad does not start on its own data directory again: %s", out)
		}
	})
	l.exec(t, "systemctl --user stop toad.service")
	l.root(t, "mount -t tmpfs -o mode=0700,uid=1001,gid=1001,size="+size+" tmpfs "+labData)
	l.exec(t, "systemctl --user start toad.service")
}

// toadRun tells one run of Toad's unit from another.
func (l *lab) toadRun(t *testing.T) string {
	t.Helper()
	return l.exec(t, "systemctl --user show -P InvocationID -P NRestarts toad.service")
}

// instance is the container that runs as the service: the same id is the same, untouched one.
func (s *labService) instance() string {
	s.t.Helper()
	id := s.exec(s.t, "podman ps --quiet --no-trunc --filter label=toad.service="+s.name)
	if len(strings.Fields(id)) != 1 {
		s.t.Fatalf("instances of %s: %q", s.name, id)
	}
	return id
}

// refused demands that a deployment is refused with that code, and that the instance does not notice.
func (s *labService) refused(req deployRequest, code string, says ...string) {
	s.t.Helper()
	before := s.instance()
	var op wireOperation
	p, err := s.call("POST", "/v1/deployments", req, &op)
	if err != nil || p == nil || p.Code != code || p.Status != statuses[code] {
		s.t.Fatalf("answered %+v %v %+v, want %s", p, err, op, code)
	}
	for _, text := range says {
		if !strings.Contains(p.Detail, text) {
			s.t.Errorf("the answer does not say %q: %s", text, p.Detail)
		}
	}
	if strings.Contains(p.Detail, "/") {
		s.t.Errorf("the answer names a file: %s", p.Detail)
	}
	if after := s.instance(); after != before {
		s.t.Errorf("a refused deployment replaced the instance %s by %s", before, after)
	}
}

// The data directory's file system is filled up for real: a deployment is refused before anything is
// touched, a rollout under way ends, whichever way it goes, and with space again the next one works, all
// without a restart of Toad.
func TestLabDiskFull(t *testing.T) { // E8
	l := theLab(t)
	l.ownData(t, "64m")
	s := l.enroll(t, "full", quick, func(s *labService) { s.en.Probation.StabilityWindow = duration(4 * time.Second) })
	one, two, bad := s.image("VERSION=1"), s.image("VERSION=2"), s.image("VERSION=3", "NEVER_READY=1")
	s.promote(one)
	run := l.toadRun(t)
	fill := func() {
		t.Helper()
		l.exec(t, "head -c 200M /dev/zero > "+labData+"/fill 2>/dev/null; true")
		if free := l.exec(t, "df --output=avail "+labData+" | tail -n 1"); strings.TrimSpace(free) != "0" {
			t.Fatalf("%s KiB are still free: nothing is shown", free)
		}
	}
	open := func() {
		t.Helper()
		s.eventuallyFor(t, time.Minute, "the service is open", func() bool { return s.view().Problem == "" })
	}
	free := func() { t.Helper(); l.exec(t, "rm "+labData+"/fill"); open() }
	archived := func(op wireOperation) {
		t.Helper()
		s.eventually("the operation is archived", func() bool {
			b, err := os.ReadFile(l.path(labData + "/services/full/operations/" + op.ID + ".json"))
			return err == nil && strings.HasSuffix(string(b), "}\n")
		})
	}

	fill()
	s.refused(s.request(two), "state_unavailable", "free some space")
	s.expectRuns(one)
	free()
	s.promote(two)
	s.expectRuns(two)

	underWay := func(image string) wireOperation {
		t.Helper()
		op := s.submit(image)
		s.awaitState(op.ID, "probation")
		return op
	}
	still := func(op wireOperation) {
		t.Helper()
		if op = s.await(op.ID, func(wireOperation) bool { return true }); op.Terminal {
			t.Fatalf("the operation was %s before the disk was full: nothing is shown", op.State)
		}
	}
	op := underWay(one)
	fill()
	still(op)
	s.expect(s.await(op.ID, nil), "promoted", "")
	s.expectRuns(one)
	archived(op)
	fill() // what the reserve gave back
	s.refused(s.request(two), "state_unavailable")
	free()
	s.promote(two)

	op = underWay(bad)
	fill()
	if p := l.mustCall(t, "POST", "/v1/operations/"+op.ID+"/rollback", nil, &op); p != nil {
		t.Fatalf("asking for a rollback: %+v", p)
	}
	s.expect(s.await(op.ID, nil), "rolled_back", "requested")
	s.expectRuns(two)
	free()

	// There is room, and no file can be made any more.
	inodes := func(n string) { t.Helper(); l.root(t, "mount -o remount,nr_inodes="+n+" "+labData) }
	inodes("$(($(df --output=iused " + labData + " | tail -n 1)))")
	s.refused(s.request(one), "state_unavailable", "free some space")
	s.expectRuns(two)
	inodes("10000")
	op = underWay(one)
	inodes("$(($(df --output=iused " + labData + " | tail -n 1)))")
	still(op)
	s.expect(s.await(op.ID, nil), "promoted", "")
	s.expectRuns(one)
	inodes("10000")
	open()
	s.promote(two)

	if now := l.toadRun(t); now != run {
		t.Errorf("Toad was restarted: %s, then %s", run, now)
	}
	l.sound(t, "full")
}

// toadCopy runs another Toad by hand, in a container like the unit's, until it ends or is ended.
func (l *lab) toadCopy(t *testing.T, data, quadlets string) (out string, status int) {
	t.Helper()
	if data != "" {
		data = "--volume " + data
	}
	begun := time.Now()
	out, status = l.try("sh", "-c", `timeout 30 podman run --rm --pull never --network none --read-only --cap-drop all --security-opt no-new-privileges \
--volume /run/user/1001/bus:/run/toad/bus --volume /run/user/1001/podman:/run/toad/podman --volume ~/.config/toad/enrollment:/enrollment:ro \
--volume `+quadlets+" "+data+" localhost/toad:latest serve")
	if d := time.Since(begun); d > 15*time.Second {
		t.Errorf("it took %s to end", d)
	}
	return out, status
}

// What Toad cannot work with is refused at its start, by name and with what to do.
func TestLabRefusedAtStart(t *testing.T) {
	l := theLab(t)
	t.Cleanup(func() { l.root(t, "rm -rf /home/toad/refused") })
	for _, tt := range []struct {
		name           string
		make           string // as root, in the directory that has data and quadlet
		data, quadlets string // what of the mounts is special
		says           []string
	}{
		{"read-only", "", "data:/data:ro", "", []string{"data directory /data", "read-only", "mount it writable"}},
		{"read-only and used before", "touch data/lock; mkdir data/run data/services data/check; chown -R toad: data", "data:/data:ro", "", []string{"data directory /data", "read-only", "mount it writable"}},
		{"missing", "", "none", "", []string{"data directory /data", "no such file", "make it, owned by the user that runs Toad"}},
		{"a file", "rmdir data; touch data", "", "", []string{"data directory /data", "not a directory"}},
		{"of another user", "chown root: data; chmod 755 data", "", "", []string{"data directory /data", "permission denied", "must belong to the user that runs Toad"}},
		{"closed", "chmod 500 data", "", "", []string{"data directory /data", "permission denied", "must belong to the user that runs Toad"}},
		{"closed and used before", "touch data/lock; mkdir data/run data/services data/check; chown -R toad: data; chmod 500 data", "", "", []string{"data directory /data", "permission denied", "must belong to the user that runs Toad"}},
		{"services of another user", "mkdir -m 700 data/services", "", "", []string{"/data/services", "permission denied", "must belong to the user that runs Toad"}},
		{"socket directory of another user", "mkdir data/run", "", "", []string{"/data/run", "must belong to the user that runs Toad"}},
		{"no id", "mkdir -p data/services/hello; chown -R toad: data", "", "", []string{"/data/id", "services are not", "put it back from a backup"}},
		{"Quadlet directory read-only", "", "", "quadlet:/quadlet:ro", []string{"Quadlet directory /quadlet", "read-only", "mount it writable"}},
		{"Quadlet directory closed", "chmod 500 quadlet", "", "", []string{"Quadlet directory /quadlet", "permission denied", "must belong to the user that runs Toad"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l.root(t, "cd /home/toad; rm -rf refused; mkdir -p refused/data refused/quadlet; chown -R toad: refused; cd refused; "+tt.make)
			const base = "/home/toad/refused/"
			data, quadlets := base+"data:/data", base+"quadlet:/quadlet"
			switch tt.data {
			case "":
			case "none":
				data = ""
			default:
				data = base + tt.data
			}
			if tt.quadlets != "" {
				quadlets = base + tt.quadlets
			}
			out, status := l.toadCopy(t, data, quadlets)
			if status == 0 || status == 124 {
				t.Errorf("it ended with %d", status)
			}
			for _, text := range tt.says {
				if !strings.Contains(out, text) {
					t.Errorf("it does not say %q:\n%s", text, out)
				}
			}
		})
	}
}

// Of two that would work on one host one works, and the other says at once who does; the first never
// notices.
func TestLabOneWriter(t *testing.T) { // E9
	l := theLab(t)
	s := l.enroll(t, "single", quick, func(s *labService) { // Toad is away for a good part of one rollout
		s.en.Probation.StartupDeadline, s.en.Probation.RolloutDeadline = duration(3*time.Minute), duration(4*time.Minute)
	})
	one, two := s.image("VERSION=1"), s.image("VERSION=2")
	s.promote(one)
	run, instance := l.toadRun(t), s.instance()
	who := "process 1 on " + l.exec(t, "podman container inspect --format '{{.Id}}' toad")[:12]
	t.Cleanup(func() { l.try("sh", "-c", "rm -rf ~/another") })
	l.exec(t, "rm -rf ~/another; mkdir -p ~/another/data ~/another/quadlet")

	const another, data, quadlets = "/home/toad/another", labData + ":/data", "/home/toad/.config/containers/systemd:/quadlet"
	for _, tt := range []struct {
		name string
		run  func() (string, int)
		held string
	}{
		{"a stray copy of the container", func() (string, int) { return l.toadCopy(t, data, quadlets) }, "/data/lock"},
		{"another data directory", func() (string, int) { return l.toadCopy(t, another+"/data:/data", quadlets) }, "/quadlet/.toad.lock"},
		{"another Quadlet directory", func() (string, int) { return l.toadCopy(t, data, another+"/quadlet:/quadlet") }, "/data/lock"},
		{"a process of the host", func() (string, int) {
			return l.try("sh", "-c", "timeout 30 ~/.cache/lab/toad/toad serve --bus unix:path=/run/user/1001/bus --podman unix:///run/user/1001/podman/podman.sock --quadlets ~/.config/containers/systemd --data "+labData+" --enrollment ~/.config/toad/enrollment")
		}, labData + "/lock"},
		{"a restore", func() (string, int) { return l.try("sh", "-c", "toad restore < /dev/null") }, "/data/lock"},
	} {
		out, status := tt.run()
		want := fmt.Sprintf("another toad is at work: %s is held by %s; stop that one first", tt.held, who)
		if status != 1 || !strings.Contains(out, want) {
			t.Errorf("%s: exit %d:\n%s\nwant %q", tt.name, status, out, want)
		}
	}
	if now := l.toadRun(t); now != run {
		t.Errorf("Toad was restarted: %s, then %s", run, now)
	}
	if now := s.instance(); now != instance {
		t.Errorf("the instance was replaced")
	}
	s.promote(two)

	// The old process dies while the new one starts, again and again, and requests go on all the time. One
	// deployment is asked for under one key until it is accepted, and is accepted once.
	req := s.request(one)
	stop, done := make(chan struct{}), make(chan struct{})
	answers, accepted := map[string]int{}, map[string]bool{}
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
			var op wireOperation
			var v wireService
			for _, p := range []*problem{l.ask("POST", "/v1/deployments", req, &op), l.ask("GET", "/v1/services/single", nil, &v)} {
				switch {
				case p == nil:
					answers["ok"]++
				default:
					answers[p.Code]++
				}
			}
			if op.ID != "" {
				accepted[op.ID] = true
			}
		}
	}()
	for range 5 {
		l.exec(t, "systemctl --user restart toad.service")
	}
	var v wireService
	l.mustCall(t, "GET", "/v1/services/single", nil, &v)
	close(stop)
	<-done
	t.Logf("answers over five restarts: %v", answers)
	for code := range answers {
		if !slices.Contains([]string{"ok", "no answer", "shutting_down", "state_unavailable"}, code) {
			t.Errorf("answered %s", code)
		}
	}
	if len(accepted) != 1 || answers["ok"] < 5 {
		t.Fatalf("one key was accepted as %v, answers %v", accepted, answers)
	}
	for id := range accepted {
		s.expect(s.await(id, nil), "promoted", "")
	}

	// Whoever holds the lock may take its time to die: the new one is started until it has it.
	l.exec(t, "systemctl --user stop toad.service")
	t.Cleanup(func() {
		l.try("sh", "-c", "systemctl --user stop dying.service; systemctl --user start toad.service")
	})
	since := l.exec(t, `date "+%F %T"`)
	l.exec(t, "systemd-run --user --quiet --unit dying flock --no-fork "+labData+"/lock sleep infinity")
	s.eventually("the lock is held", func() bool { _, status := l.try("flock", "--nonblock", labData+"/lock", "true"); return status == 1 })
	l.exec(t, "systemctl --user start --no-block toad.service")
	s.eventually("it was tried twice", func() bool {
		return strings.Count(l.exec(t, "journalctl --user --unit toad.service --output cat --no-pager --since '"+since+"'"), "another toad is at work: /data/lock is held") >= 2
	})
	s.expectRuns(one)
	l.exec(t, "systemctl --user stop dying.service")
	l.mustCall(t, "GET", "/v1/services/single", nil, &v)
	s.promote(two)
}

// ask calls once; no answer is a problem too.
func (l *lab) ask(method, path string, body, into any) *problem {
	p, err := l.call(method, path, body, into)
	if err != nil {
		return &problem{Code: "no answer"}
	}
	return p
}

// A damaged record closes its service alone, is found and named, and is put back without undoing anything;
// and a whole lost data directory comes back from a backup.
func TestLabDamagedAndRestored(t *testing.T) {
	l := theLab(t)
	l.ownData(t, "128m")
	s, other := l.enroll(t, "flipped", quick), l.enroll(t, "beside", quick)
	one, two, third := s.image("VERSION=1"), s.image("VERSION=2"), other.image("VERSION=3")
	s.promote(one)
	last := s.promote(two)
	other.promote(other.image("VERSION=1"))
	s.eventually("the operation is archived", func() bool {
		_, err := os.Stat(l.path(labData + "/services/flipped/operations/" + last.ID + ".json"))
		return err == nil
	})
	instance, old := s.instance(), s.request(one)

	l.exec(t, "systemctl --user stop toad.service")
	file := l.path(labData + "/services/flipped/service.json")
	b, err := os.ReadFile(file)
	must(t, err)
	i := strings.Index(string(b), `"generation": 2`) + len(`"generation": `)
	b[i] ^= 1
	must(t, os.WriteFile(file, b, 0o600))
	l.exec(t, "systemctl --user start toad.service")

	if out, _ := l.try("toad", "status", "flipped"); !strings.Contains(out, "services/flipped/service.json") || !strings.Contains(out, "checksum does not match") {
		t.Errorf("the status does not say why:\n%s", out)
	}
	s.refused(old, "state_unavailable")
	s.expectRuns(two)
	if now := s.instance(); now != instance {
		t.Errorf("the instance was replaced")
	}
	other.expect(other.deploy(third), "promoted", "")
	if out, status := l.try("toad", "fsck"); status != 1 || !strings.Contains(out, "services/flipped/service.json: ") || strings.Contains(out, "beside") {
		t.Errorf("fsck exits %d:\n%s", status, out)
	}
	if after, err := os.ReadFile(file); err != nil || string(after) != string(b) {
		t.Errorf("the damaged file was changed: %v", err)
	}
	out, status := l.try("toad", "fsck", "--restore", "services/flipped/service.json")
	if status != 0 || !strings.Contains(out, "restored services/flipped/service.json from service.json.prev") {
		t.Fatalf("fsck --restore exits %d:\n%s", status, out)
	}
	var v wireService
	s.eventually("the service is open again", func() bool { v = s.view(); return v.Problem == "" && v.Installed })
	if v.Generation <= 2 || v.Current == nil || v.Current.Image != two || v.Rollback == nil || v.Rollback.Image != one {
		t.Errorf("put back as %+v", v)
	}
	s.refused(old, "stale_generation")
	if now := s.instance(); now != instance {
		t.Errorf("the instance was replaced")
	}

	// Everything is lost but the backup, and the registry.
	l.exec(t, "toad backup > ~/backup.tar")
	t.Cleanup(func() { l.try("sh", "-c", "rm -f ~/backup.tar") })
	l.exec(t, "systemctl --user stop toad.service; find "+labData+" -mindepth 1 -delete")
	out = l.exec(t, "toad restore < ~/backup.tar")
	if !strings.Contains(out, "flipped: put back") || !strings.Contains(out, "beside: put back") {
		t.Errorf("restore says:\n%s", out)
	}
	l.exec(t, "systemctl --user start toad.service")
	l.loseRegistry(t)
	s.eventually("the restored record is settled", func() bool { v = s.view(); return v.Problem == "" && v.Installed })
	before := v.Generation
	if v.Current.Image != two || v.Rollback == nil || v.Rollback.Image != one || other.view().Current.Image != third {
		t.Errorf("restored as %+v", v)
	}
	if now := s.instance(); now != instance {
		t.Errorf("the instance was replaced")
	}
	s.refused(old, "stale_generation")
	if op := s.await(last.ID, nil); op.State != "promoted" || op.Candidate.Image != two {
		t.Errorf("the operation of before reads %+v", op)
	}
	if out := l.exec(t, "toad history flipped"); strings.Count(out, "promoted") < 2 {
		t.Errorf("history:\n%s", out)
	}
	s.expect(s.rollback(), "promoted", "")
	s.expectRuns(one)
	if v := s.view(); v.Generation <= before {
		t.Errorf("generation %d after %d", v.Generation, before)
	}
	l.sound(t, "flipped", "beside")
}
