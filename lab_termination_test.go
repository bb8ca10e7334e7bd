package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// gremlin puts testdata/gremlin on the host, once.
func (l *lab) gremlin(t testing.TB) {
	t.Helper()
	if err := putGremlin(l); err != nil {
		t.Fatal(err)
	}
}

var gremlinOnce sync.Once
var gremlinErr error

func putGremlin(l *lab) error {
	gremlinOnce.Do(func() {
		to := l.path("/usr/local/bin/gremlin")
		build := exec.Command("go", "build", "-o", to+".new", "./testdata/gremlin")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			gremlinErr = fmt.Errorf("building the gremlin: %w\n%s", err, out)
			return
		}
		gremlinErr = os.Rename(to+".new", to) // an old one may be running
	})
	return gremlinErr
}

// hangs mounts the file system whose file makes its reader unkillable, and returns what lets go of it.
func (s *labService) hangs() (release func()) {
	s.t.Helper()
	s.gremlin(s.t)
	dir, unit := "/srv/"+s.name, "gremlin-"+s.name
	s.root(s.t, fmt.Sprintf("mkdir -p %s && systemd-run -q --collect --unit=%s /usr/local/bin/gremlin fuse %s", dir, unit, dir))
	s.t.Cleanup(func() {
		s.try("--root", "sh", "-c", fmt.Sprintf("systemctl stop %s; umount -l %s; rmdir %s", unit, dir, dir))
	})
	s.eventually("the hanging file is there", func() bool {
		_, status := s.try("--root", "test", "-e", dir+"/hang")
		return status == 0
	})
	return func() {
		s.t.Helper()
		s.root(s.t, "systemctl kill -s USR1 "+unit)
	}
}

// expectHeld demands that the service is held, that the answer says what remains, and that a deployment
// is refused.
func (s *labService) expectHeld(op wireOperation, remains string) {
	s.t.Helper()
	v := s.view()
	if v.Held == nil || v.Held.OperationID != op.ID || !strings.Contains(strings.Join(v.Held.Remains, "; "), remains) {
		s.t.Fatalf("held: %+v, want what remains to say %q\n%s", v.Held, remains, s.log(op.ID))
	}
	var refused wireOperation
	if p := s.mustCall(s.t, "POST", "/v1/deployments", s.request(op.Candidate.Image), &refused); p == nil || p.Code != "held" || !strings.Contains(p.Detail, remains) {
		s.t.Fatalf("a deployment to a held service: %+v %+v", p, refused)
	}
}

func (s *labService) expectReleased() {
	s.t.Helper()
	if !s.within(90*time.Second, func() bool { return s.view().Held == nil }) {
		s.t.Fatalf("still held: %+v", s.view().Held)
	}
}

// neverStarted demands of Podman's own event log that no container of the operation was ever started.
func (s *labService) neverStarted(op wireOperation) {
	s.t.Helper()
	out := s.exec(s.t, fmt.Sprintf("podman events --stream=false --since %d --filter event=start --filter label=toad.operation=%s --format '{{.ID}}'", time.Time(op.CreatedAt).Unix()-1, op.ID))
	if out != "" {
		s.t.Fatalf("a container of generation %d was started: %s", op.Generation, out)
	}
}

// untouched runs f and demands that the unit's instance is the same after it.
func (s *labService) untouched(f func()) {
	s.t.Helper()
	before := s.unit("InvocationID")
	f()
	if after := s.unit("InvocationID"); after != before || s.unit("ActiveState") != "active" {
		s.t.Fatalf("the running instance was touched: invocation %s, then %s (%s)", before, after, s.unit("ActiveState"))
	}
}

// Instances that systemd or Podman calls strange names, but that are dead: the rollout goes on.
func TestLabConfirmedDead(t *testing.T) {
	l := theLab(t)
	for _, tt := range []struct {
		name, env string
		before    string // on the host, before the deployment
	}{
		{"deaf", "IGNORE_TERM=1", ""}, // S1: the unit ends failed
		{"paused", "VERSION=1", "podman pause dead-paused"},
		{"cidfile", "IGNORE_TERM=1", "rm $XDG_RUNTIME_DIR/dead-cidfile.cid"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := l.enroll(t, "dead-"+tt.name, brisk, func(s *labService) {
				s.en.StopDeadline = duration(10 * time.Second)
				s.template("TimeoutStopSec=2", "TimeoutStopSec=3")
			})
			old, next := s.image("VERSION=1", tt.env), s.image("VERSION=2")
			s.promote(old)
			s.exec(t, tt.before+"\ntrue")
			s.promote(next)
			s.expectRuns(next)
			if all := s.exec(t, "podman ps -a --filter label=toad.service="+s.name+" --format '{{.ID}}'"); len(strings.Fields(all)) != 1 {
				t.Errorf("containers of the service: %s", all)
			}
		})
	}
}

// podman and conmon are killed in the middle of the stop: the instance is not called stopped before its
// process is gone. S2.
func TestLabConmonKilledDuringTheStop(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "conmon")
	old, next := s.image("VERSION=1", "IGNORE_TERM=1"), s.image("VERSION=2")
	s.promote(old)
	pids := strings.Fields(s.exec(t, "podman inspect -f '{{.State.Pid}} {{.State.ConmonPid}}' conmon"))
	// As long as the old process lives, nothing of the new generation may be there.
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	watch := exec.CommandContext(ctx, filepath.Join("testdata", "lab", "lab"), "--name", s.lab.name, "exec", "sh", "-c",
		"while [ -d /proc/"+pids[0]+" ]; do new=$(podman ps -q --filter label=toad.service=conmon --filter label=toad.generation=2); [ ! -d /proc/"+pids[0]+" ] || printf %s \"$new\"; done")
	both := make(chan string, 1)
	go func() { b, err := watch.Output(); both <- fmt.Sprint(strings.TrimSpace(string(b)), err) }()

	id := s.submit(next).ID
	s.awaitState(id, "activating")
	s.eventually("the stop has begun", func() bool { return s.unit("ActiveState") == "deactivating" })
	// ControlPID is podman's; 0, when it is through, would be everybody in the group.
	s.exec(t, "p=$(systemctl --user show -P ControlPID conmon.service); [ $p = 0 ] || kill -KILL $p; kill -KILL "+pids[1]+"; true")
	op := s.await(id, nil)
	if got := <-both; got != "<nil>" {
		t.Errorf("while the old process lived: %s", got)
	}
	if op.State == "failed" {
		s.expect(op, "failed", "termination_unconfirmed")
		s.expectReleased()
		return
	}
	s.expect(op, "promoted", "")
	s.expectRuns(next)
}

// The old instance cannot be killed: systemd says failed, nothing is started. S1.
func TestLabUnkillableOldInstance(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "stuckold", brisk, func(s *labService) {
		s.inContainer("Volume=/srv/stuckold:/hang")
	})
	release := s.hangs()
	old := s.image("VERSION=1", "HANG=/hang/hang")
	s.promote(old)
	op := s.deploy(s.image("VERSION=2"))
	s.expect(op, "failed", "termination_unconfirmed")
	s.expectHeld(op, "")
	s.neverStarted(op)
	s.eventually("systemd is through with it", func() bool { return s.unit("ActiveState") == "failed" })
	s.eventually("the answer says what is there", func() bool {
		h := s.view().Held
		return h != nil && strings.Contains(strings.Join(h.Remains, "; "), "process(es) in the unit's control group")
	})
	s.expectHeld(op, "process(es) in the unit's control group")
	s.neverStarted(op)
	release()
	s.expectReleased()
	s.eventually("the current revision is back", func() bool { return slices.Equal(s.running(), []string{old}) })
	third := s.image("VERSION=3")
	s.promote(third)
	s.expectRuns(third)
}

// The candidate cannot be killed: the target is not started beside it, its unit is put in place once the
// candidate is gone, and a later deployment works. S1.
func TestLabUnkillableCandidate(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "stuckcand", brisk, func(s *labService) {
		s.inContainer("Volume=/srv/stuckcand:/hang")
		s.en.Probation.StartupDeadline = duration(12 * time.Second)
	})
	release := s.hangs()
	old := s.image("VERSION=1")
	s.promote(old)
	op := s.deploy(s.image("VERSION=2", "HANG=/hang/hang", "NEVER_READY=1"))
	s.expect(op, "failed", "rollback_failed")
	if op.Failure.Cause != "startup_deadline" {
		t.Errorf("cause %s", op.Failure.Cause)
	}
	s.expectHeld(op, "")
	s.eventually("the answer says what is there", func() bool {
		h := s.view().Held
		return h != nil && strings.Contains(strings.Join(h.Remains, "; "), "process(es) in the unit's control group")
	})
	release()
	s.expectReleased()
	if f := s.unitFile(); !strings.Contains(f, old) || !strings.Contains(f, "[Install]") {
		t.Errorf("the unit is not the target's:\n%s", f)
	}
	s.expectRuns()
	third := s.image("VERSION=3")
	s.promote(third)
	s.expectRuns(third)
}

// A container of the same name or service that systemd does not run: seen in preparing it is named and
// nothing is stopped; one that appears after the stop holds the service. It is never touched. S3.
func TestLabForeignContainer(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "foreign", func(s *labService) { s.en.Probation.StabilityWindow = duration(2 * time.Second) })
	t.Cleanup(func() { s.try("podman", "rm", "-f", "-t0", "-i", "foreign-other") })
	old, next := s.image("VERSION=1", "IGNORE_TERM=1"), s.image("VERSION=2")

	// Its name is taken, and there is no unit yet.
	other := s.exec(t, "podman run -q -d --name foreign "+old)
	op := s.deploy(old)
	s.expect(op, "failed", "foreign_container")
	if s.view().Held != nil || s.exec(t, "podman inspect -f '{{.State.Running}}' "+other) != "true" {
		t.Fatalf("held %+v, or the foreign container was touched", s.view().Held)
	}
	s.exec(t, "podman rm -f -t0 foreign")
	s.promote(old)

	// Its label is on another container, running and then only created.
	for _, how := range []string{"run -q -d", "create -q"} {
		s.untouched(func() {
			other := s.exec(t, "podman "+how+" --name foreign-other --label toad.service=foreign "+old)
			op := s.deploy(next)
			s.expect(op, "failed", "foreign_container")
			if !strings.Contains(op.Failure.Summary, "foreign-other ("+other[:12]+")") || s.view().Held != nil {
				t.Errorf("%s, held %+v", op.Failure.Summary, s.view().Held)
			}
			s.exec(t, "podman rm -f -t0 foreign-other")
		})
	}

	// One appears during the stop.
	id := s.submit(next).ID
	s.awaitState(id, "activating")
	s.eventually("the stop has begun", func() bool { return s.unit("ActiveState") != "active" })
	other = s.exec(t, "podman run -q -d --name foreign-other --label toad.service=foreign "+old)
	op = s.await(id, nil)
	s.expect(op, "failed", "termination_unconfirmed")
	s.expectHeld(op, "container foreign-other ("+other[:12]+") is running")
	s.neverStarted(op)
	if s.exec(t, "podman inspect -f '{{.State.Running}}' "+other) != "true" {
		t.Error("the foreign container was touched")
	}
	s.exec(t, "podman rm -f -t0 foreign-other")
	s.expectReleased()
	s.eventually("the current revision is back", func() bool { return slices.Equal(s.running(), []string{old}) })
	s.promote(next)
	s.expectRuns(next)
}

// The unit's control group is frozen: the user manager itself hangs as it spawns the stop. Toad answers,
// the rollout ends by its deadline, nothing is started, and after the thaw the service comes back.
func TestLabManagerHangs(t *testing.T) {
	s := theLab(t).enroll(t, "frozen", brisk)
	old, next := s.image("VERSION=1"), s.image("VERSION=2")
	s.promote(old)
	freeze := "/sys/fs/cgroup" + s.unit("ControlGroup") + "/cgroup.freeze"
	thaw := func() { s.try("--root", "sh", "-c", "echo 0 > "+freeze) }
	t.Cleanup(thaw)
	id := s.submit(next).ID
	s.awaitState(id, "activating")
	// Stopped or not by now, what of it is left is frozen; a unit that is through already shows nothing.
	s.root(t, "echo 1 > "+freeze)
	op := s.await(id, func(op wireOperation) bool {
		begun := time.Now()
		s.view()
		if d := time.Since(begun); d > 2*time.Second {
			t.Errorf("the API took %s while the manager hung", d)
		}
		return false
	})
	s.expect(op, "failed", "termination_unconfirmed")
	s.expectHeld(op, "systemd does not ") // answer at all, or tell the processes: it depends on where the stop was met
	thaw()
	s.expectReleased()
	s.eventually("the current revision is back", func() bool { return slices.Equal(s.running(), []string{old}) })
	s.neverStarted(op)
	s.promote(next)
	s.expectRuns(next)
}

// Podman's socket accepts and never answers: before the stop nothing is touched, after it nothing is
// started; the API and other services answer meanwhile. S4.
func TestLabPodmanDeaf(t *testing.T) {
	l := theLab(t)
	l.gremlin(t)
	short := func(s *labService) { s.en.FetchDeadline = duration(8 * time.Second) }
	s, other := l.enroll(t, "podmandeaf", short), l.enroll(t, "podmandeaf2", short)
	old, next := s.image("VERSION=1", "IGNORE_TERM=1"), s.image("VERSION=2")
	s.promote(old)
	first := other.image("VERSION=1")
	other.promote(first)

	deafen := func() {
		l.exec(t, `systemctl --user kill -s KILL podman.service 2>/dev/null; systemctl --user stop podman.socket podman.service
systemd-run --user -q --collect --unit=gremlin-deaf /usr/local/bin/gremlin deaf $XDG_RUNTIME_DIR/podman/podman.sock`)
	}
	heal := func() {
		l.try("sh", "-c", "systemctl --user stop gremlin-deaf.service; systemctl --user start podman.socket")
	}
	t.Cleanup(heal)

	id := s.submit(next).ID
	s.awaitState(id, "activating")
	deafen()
	op := s.await(id, nil)
	s.expect(op, "failed", "termination_unconfirmed")
	s.expectHeld(op, "Podman does not answer")
	begun := time.Now()
	other.untouched(func() { other.expect(other.deploy(other.image("VERSION=2")), "failed", "interrupted") })
	t.Logf("a deployment while Podman is deaf ended after %s", time.Since(begun).Round(time.Second))
	begun = time.Now()
	other.view()
	if d := time.Since(begun); d > 2*time.Second {
		t.Errorf("the API took %s", d)
	}
	heal()
	s.expectReleased()
	s.eventually("the current revision is back", func() bool { return slices.Equal(s.running(), []string{old}) })
	s.neverStarted(op)
	s.promote(next)
	second := other.image("VERSION=2")
	other.promote(second)
	other.expectRuns(second)
}

// What is wrong with an image is found before anything is touched. G4.
func TestLabImagesRefused(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "images", brisk)
	good := s.image("VERSION=1")
	s.promote(good)
	out, err := s.lab.lab("image", "--index", "apps/images", "VERSION=2").Output()
	must(t, err)
	s.untouched(func() {
		for image, want := range map[string]struct{ code, says string }{
			strings.TrimSpace(string(out)):        {"not_single_platform", s.image("VERSION=2")},
			s.image("VERSION=3", "ARCH=arm64"):    {"wrong_platform", "linux/arm64"},
			s.image("VERSION=4", "VOLUME=/state"): {"volume_not_covered", "/state"},
		} {
			op := s.deploy(image)
			s.expect(op, "failed", want.code)
			_, digest, _ := strings.Cut(want.says, "@")
			if says := want.says; !strings.Contains(op.Failure.Summary+op.Failure.Hint, says) && (digest == "" || !strings.Contains(op.Failure.Summary+op.Failure.Hint, digest)) {
				t.Errorf("%s does not say %s: %s", want.code, says, op.Failure.Summary)
			}
		}
		var op wireOperation
		if p := s.mustCall(t, "POST", "/v1/deployments", s.request(strings.Replace(good, "apps/images", "apps/other", 1)), &op); p == nil || p.Code != "repository_not_allowed" {
			t.Errorf("another repository: %+v", p)
		}
	})
	s.inContainer("Volume=images-state:/state")
	s.apply()
	covered := s.image("VERSION=4", "VOLUME=/state")
	s.promote(covered)
	s.expectRuns(covered)
	s.exec(t, "systemctl --user stop images.service; podman volume rm -f images-state")
}

// Every fault of a template that the host would choke on is found before the old instance is stopped;
// what the host says of it is in the local log only. E4.
func TestLabUnitsRefused(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "units", brisk)
	s.promote(s.image("VERSION=1"))
	next, good := s.image("VERSION=2"), s.tmpl
	s.untouched(func() {
		for _, tt := range []struct {
			old, new string
			local    string // in the local log; "": the enrollment itself is refused
		}{
			{"[Container]", "[Container]\nBogus=1", "unsupported key 'Bogus'"},
			{"[Container]", "[Container]\nVolume=nope.volume:/x", "nope.volume"},
			{"[Container]", "[Container]\nExec=%Z", "specifier"},
			{"[Service]", "[Service]\nExecStartPre=relative/path", "relative/path"},
			{"[Service]", "[Service]\nBogus=1", "Unknown key 'Bogus'"},
			{"[Service]", "[Service]\nTimeoutStartSec=banana", "banana"},
			{"Restart=always", "Restart=banana", "banana"},
			{"[Service]", "[Service]\nEnvironment=\"A=b", "Invalid syntax"},
			{"[Container]", "[Container]\nPodmanArgs=--nonsense", "unknown flag: --nonsense"},
			{"[Container]", "[Container]\nGlobalArgs=--nonsense", "unknown flag: --nonsense"},
			{"[Container]", "[Container]\nNetwork=nope.network", ""}, // as the faults of enrollment_test.go
		} {
			s.tmpl = good
			s.template(tt.old, tt.new)
			s.apply()
			since := s.exec(t, "date +%s")
			var op wireOperation
			var p *problem
			if !s.within(30*time.Second, func() bool { // the last good enrollment stays in force for 10 s
				p = s.mustCall(t, "POST", "/v1/deployments", s.request(next), &op)
				if p == nil {
					op = s.await(op.ID, nil)
				}
				return tt.local != "" || p != nil
			}) || tt.local == "" && p.Code != "enrollment_invalid" || tt.local != "" && p != nil {
				t.Errorf("%s: %+v, operation %s %+v", tt.new, p, op.State, op.Failure)
				continue
			}
			if tt.local == "" {
				continue
			}
			if op.State != "failed" || op.Failure.Code != "unit_invalid" {
				t.Errorf("%s: ended %s, %+v\n%s", tt.new, op.State, op.Failure, s.log(op.ID))
				continue
			}
			said := s.exec(t, "journalctl --user -u toad.service -o cat --since @"+since)
			if !strings.Contains(said, tt.local) {
				t.Errorf("%s: the local log does not say %q:\n%s", tt.new, tt.local, said)
			}
			if public := s.log(op.ID) + op.Failure.Summary; strings.Contains(public, tt.local) {
				t.Errorf("%s: what the host said is public:\n%s", tt.new, public)
			}
		}
	})
	s.tmpl = good
	s.apply()
	s.promote(next)
	s.expectRuns(next)
}

// Another unit that would start or stop with the service: named, and nothing is stopped.
func TestLabOtherUnitsPull(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "pulled", brisk)
	s.promote(s.image("VERSION=1"))
	next := s.image("VERSION=2")
	t.Cleanup(func() {
		s.try("sh", "-c", "systemctl --user stop 'pulled-friend*'; rm -f .config/systemd/user/pulled-friend*; systemctl --user daemon-reload")
	})
	s.untouched(func() {
		for i, how := range []string{"Wants", "BindsTo", "Upholds"} {
			friend := fmt.Sprintf("pulled-friend%d.service", i)
			line, of := how+"=pulled.service", friend
			s.write(t, ".config/systemd/user/"+friend, "[Unit]\n"+line+"\n[Service]\nExecStart=/bin/sleep 1000\n")
			s.exec(t, "systemctl --user daemon-reload && systemctl --user start "+friend)
			op := s.deploy(next)
			s.expect(op, "failed", "unit_invalid")
			if !strings.Contains(op.Failure.Summary, of) {
				t.Errorf("%s: %s", how, op.Failure.Summary)
			}

			s.exec(t, "systemctl --user stop "+friend+" && rm .config/systemd/user/"+friend+" && systemctl --user daemon-reload")
		}
	})
	s.promote(next)
	s.expectRuns(next)
}

// Starts that Toad makes are not refused by the unit's own start limit.
func TestLabStartLimit(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "limit", brisk, func(s *labService) {
		s.tmpl = "[Unit]\nStartLimitIntervalSec=1h\nStartLimitBurst=2\n\n" + s.tmpl
	})
	for i := range 4 {
		s.promote(s.image(fmt.Sprintf("VERSION=%d", i)))
	}
}

// Somebody reloads the manager again and again during a rollout and a rollback: no harm.
func TestLabReloadsInALoop(t *testing.T) {
	s := theLab(t).enroll(t, "reloads", func(s *labService) {
		s.en.Probation.RolloutDeadline = duration(2 * time.Minute)
		s.en.Probation.StabilityWindow = duration(3 * time.Second)
		s.en.Probation.StartupDeadline = duration(15 * time.Second)
	})
	first := s.image("VERSION=1")
	s.promote(first)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan int)
	go func() {
		n := 0
		for ; ctx.Err() == nil; n++ {
			s.try("systemctl", "--user", "daemon-reload")
		}
		done <- n
	}()
	second := s.image("VERSION=2")
	op := s.deploy(second)
	bad := s.deploy(s.image("VERSION=3", "NEVER_READY=1"))
	cancel()
	t.Logf("%d reloads meanwhile", <-done)
	s.expect(op, "promoted", "")
	s.expect(bad, "rolled_back", "startup_deadline")
	if op.Restarts != 0 || bad.Restarts != 0 {
		t.Errorf("%d and %d restarts", op.Restarts, bad.Restarts)
	}
	s.expectRuns(second)
}

// A file that the generator cannot load takes the units of its directory: what vanished is said, by
// event and alert, nothing that runs is touched, and Toad's own writes go on where they can. E13.
func TestLabBrokenQuadlets(t *testing.T) {
	l := theLab(t)
	one, two := l.enroll(t, "broken-one", brisk), l.enroll(t, "broken-two", brisk)
	one.promote(one.image("VERSION=1"))
	two.promote(two.image("VERSION=1"))
	events := func(s string) string {
		return l.exec(t, "cat .local/share/toad/"+s+"events.jsonl")
	}
	garbage := func(path string) {
		t.Helper()
		l.write(t, path, "garbage\n")
		l.exec(t, "systemctl --user daemon-reload")
	}
	t.Cleanup(func() {
		l.try("sh", "-c", "cd .config/containers/systemd && rm -f broken-one/zz.container zz.container _infra/*/zz.container && systemctl --user daemon-reload")
	})

	// In one service's own directory.
	next := two.image("VERSION=2")
	fourth, fifth := one.image("VERSION=4"), one.image("VERSION=5") // Toad's own watchdog does not wait long
	one.untouched(func() {
		garbage(".config/containers/systemd/broken-one/zz.container")
		if one.unit("LoadState") != "not-found" {
			t.Fatal("the file does no harm: this shows nothing")
		}
		one.eventually("the loss is told", func() bool { return strings.Contains(events("services/broken-one/"), `"type":"unit-lost"`) })
		two.promote(next)
		op := one.deploy(one.image("VERSION=2"))
		one.expect(op, "failed", "unit_invalid")
		if !strings.Contains(op.Failure.Summary, "zz.container") {
			t.Error(op.Failure.Summary)
		}
	})
	if strings.Contains(events("services/broken-two/"), "unit-lost") {
		t.Error("the other service's unit was told lost")
	}
	l.exec(t, "rm .config/containers/systemd/broken-one/zz.container && systemctl --user daemon-reload")
	one.promote(one.image("VERSION=2"))

	// In the top directory there is nothing to lose: infrastructure's files have directories of their own.
	garbage(".config/containers/systemd/zz.container")
	one.promote(one.image("VERSION=3"))
	if strings.Contains(events(""), `"type":"unit-lost"`) {
		t.Error("Toad's own unit was lost to a file in the top directory")
	}
	l.exec(t, "rm .config/containers/systemd/zz.container && systemctl --user daemon-reload")

	// Beside Toad's own unit: told, and deployments go on.
	garbage(".config/containers/systemd/_infra/toad/zz.container")
	one.promote(fourth)
	one.eventually("the loss of Toad's own unit is told", func() bool { return strings.Contains(events(""), `"type":"unit-lost"`) })
	l.exec(t, "rm .config/containers/systemd/_infra/toad/zz.container && systemctl --user daemon-reload")

	// Beside the network of the services: refused before anything stops.
	one.untouched(func() {
		two.untouched(func() {
			garbage(".config/containers/systemd/_infra/apps/zz.container")
			one.expect(one.deploy(fifth), "failed", "unit_invalid")
			l.exec(t, "rm .config/containers/systemd/_infra/apps/zz.container && systemctl --user daemon-reload")
		})
	})
	third := one.image("VERSION=3")
	one.promote(third)
	one.expectRuns(third)
}
