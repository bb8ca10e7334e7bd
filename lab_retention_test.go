package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// loseRegistry stops the registry and deletes all it has, until the test's end.
func (l *lab) loseRegistry(t testing.TB) {
	t.Helper()
	t.Cleanup(func() { l.root(t, "systemctl start docker-registry") })
	l.root(t, "systemctl stop docker-registry; rm -rf /var/lib/docker-registry/*")
}

// restartToad starts the server anew; what it looks at slowly it looks at first thing then.
func (l *lab) restartToad(t testing.TB) {
	t.Helper()
	l.exec(t, "systemctl --user restart toad.service")
	var h wireHealthz
	l.mustCall(t, "GET", "/v1/health", nil, &h)
}

// rollback asks for the retained revision and follows it to the end.
func (s *labService) rollback() wireOperation {
	s.t.Helper()
	g := s.view().Generation
	var op wireOperation
	if p := s.mustCall(s.t, "POST", "/v1/services/"+s.name+"/rollback", rollbackRequest{&g, fmt.Sprint(s.name, "-back-", time.Now().UnixNano())}, &op); p != nil {
		s.t.Fatalf("rolling back %s: %+v", s.name, p)
	}
	return s.await(op.ID, nil)
}

// events are the types of the service's events, read from its log on the host.
func (s *labService) events() []string {
	s.t.Helper()
	var types []string
	b, err := os.ReadFile(s.path("/home/toad/.local/share/toad/services/" + s.name + "/events.jsonl"))
	must(s.t, err)
	for line := range strings.Lines(string(b)) {
		var e event
		must(s.t, json.Unmarshal([]byte(line), &e))
		types = append(types, e.Type)
	}
	return types
}

// Whatever is pruned or removed, with the registry stopped and its storage deleted: the retained revision
// can be rolled back to, and the current one redeployed.
func TestLabRollbackFromLocalBytes(t *testing.T) { // G1, G6
	l := theLab(t)
	s := l.enroll(t, "local", quick)
	one, two := s.image("VERSION=1"), s.image("VERSION=2")
	s.promote(one)
	s.promote(two)
	l.loseRegistry(t)
	for _, loss := range []string{
		"podman image prune --all --force",
		"podman system prune --all --force",
		"podman rmi --force " + one,
	} {
		l.exec(t, loss)
		if l.exec(t, "podman images -q --no-trunc "+one) != "" {
			t.Fatalf("%s left the retained image in Podman: nothing is shown", loss)
		}
		if v := s.view(); !v.Rollback.Ready {
			t.Errorf("after %s the rollback is not ready: %+v", loss, v.Rollback.Problems)
		}
		s.expect(s.rollback(), "promoted", "")
		s.expectRuns(one)
		l.exec(t, loss)
		s.expect(s.deploy(two), "promoted", "") // the retained one's digest again, from the layout
		s.expectRuns(two)
	}
	s.expect(s.deploy(two), "promoted", "") // G6: the current digest
	s.expectRuns(two)
}

// At every step of a rollout that fails somebody prunes all that is not in use, and the registry is gone:
// the rollback works.
func TestLabPruneAtEachStep(t *testing.T) { // G1, G2
	l := theLab(t)
	l.installHooked(t)
	s := l.enroll(t, "killed", quick)
	l.watchSingleton(t, "killed")
	good := s.image("VERSION=1")
	s.promote(good)
	for i, at := range []string{
		"preparing syncdir killed.revisions", // before the fetch: the registry is still needed
		"activating syncdir killed", "activating/stop syncdir killed", "activating/write syncdir killed", "activating/start syncdir killed",
		"probation syncdir killed",
		"rolling_back syncdir killed", "rolling_back/stop syncdir killed", "rolling_back/write syncdir killed", "rolling_back/start syncdir killed", "rolling_back/verify syncdir killed",
	} {
		if !today(i) {
			continue
		}
		at = strings.Replace(at, "killed.", "killed/", 1)
		t.Run(strings.ReplaceAll(at, "/", "."), func(t *testing.T) {
			s := &labService{lab: s.lab, t: t, name: s.name, en: s.en, tmpl: s.tmpl}
			bad := s.image("VERSION=3", "CRASH=1")
			op := s.interrupted(at, func() string { return bad }, func() {
				if !strings.HasPrefix(at, "preparing") {
					l.root(t, "systemctl stop docker-registry; rm -rf /var/lib/docker-registry/*")
				}
				l.exec(t, "podman system prune --all --force; rm .local/share/toad/paused")
			})
			l.root(t, "systemctl start docker-registry")
			s.expect(op, "rolled_back", "restart_budget")
			s.expectRuns(good)
		})
	}
}

// What of the retained revision is lost is said before it is needed, and repaired where it can be.
func TestLabRetentionProblemsAreSaid(t *testing.T) { // G3, G8
	l := theLab(t)
	s := l.enroll(t, "kept", quick, func(s *labService) {
		s.tmpl = strings.Replace(s.tmpl, "[Service]", "Secret=kept-secret\nVolume=kept-data:/data\n\n[Service]", 1)
	})
	l.exec(t, "printf x | podman secret create --replace kept-secret - >/dev/null; podman volume create --ignore kept-data >/dev/null")
	t.Cleanup(func() { l.try("sh", "-c", "podman secret rm kept-secret; podman volume rm -f kept-data") })
	one, two := s.image("VERSION=1"), s.image("VERSION=2")
	s.promote(one)
	s.promote(two)
	s.eventually("the rollback is ready", func() bool { return s.view().Rollback.Ready })

	problem := func(code string) {
		t.Helper()
		s.eventually("the problem is said: "+code, func() bool {
			v := s.view()
			return !v.Rollback.Ready && slices.ContainsFunc(v.Rollback.Problems, func(p wireProblem) bool { return p.Code == code })
		})
	}
	l.exec(t, "podman secret rm kept-secret")
	l.restartToad(t)
	problem("secret_missing")
	l.exec(t, "printf x | podman secret create kept-secret - >/dev/null")
	l.restartToad(t)
	s.eventually("ready again", func() bool { return s.view().Rollback.Ready })

	// A blob of the retained image is damaged, and the registry is down: said; the registry is back: repaired.
	l.root(t, "systemctl stop docker-registry")
	t.Cleanup(func() { l.root(t, "systemctl start docker-registry") })
	hex := strings.TrimPrefix(digestOf(one), "sha256:")
	l.exec(t, fmt.Sprintf("echo damaged > .local/share/toad/services/kept/images/blobs/sha256/%s", hex))
	l.restartToad(t)
	problem("image_damaged")
	if out := l.exec(t, "journalctl --user CONTAINER_NAME=toad -p err --no-pager -q -n 20"); !strings.Contains(out, "retention-lost") {
		t.Errorf("there is no alert:\n%s", out)
	}
	l.root(t, "systemctl start docker-registry")
	l.restartToad(t)
	s.eventually("repaired", func() bool { return s.view().Rollback.Ready })
	types := s.events()
	if !slices.Contains(types, "retention-lost") || !slices.Contains(types, "retention-restored") {
		t.Errorf("events %v", types)
	}
	s.expect(s.rollback(), "promoted", "")
	s.expectRuns(one)
}

// A rollback to a revision that does not come back is tried once: over a killed Toad and over a boot.
func TestLabFailedRollbackIsTriedOnce(t *testing.T) { // G7
	l := theLab(t)
	s := l.enroll(t, "once", quick, func(s *labService) {
		s.tmpl = strings.Replace(s.tmpl, "[Service]", "Volume=once-data:/data\n\n[Service]", 1)
		s.en.Probation.RolloutDeadline = duration(20 * time.Second)
		s.en.Probation.StartupDeadline = duration(15 * time.Second)
	})
	t.Cleanup(func() { l.try("podman", "volume", "rm", "-f", "once-data") })
	good := s.image("VERSION=1", "UNREADY_FILE=/data/unready")
	s.promote(good)
	l.exec(t, `podman unshare touch "$(podman volume inspect --format '{{.Mountpoint}}' once-data)/unready"`)
	op := s.submit(s.image("VERSION=2", "CRASH=1"))
	s.await(op.ID, func(op wireOperation) bool { return op.State == "rolling_back" })
	s.eventually("the target was started", func() bool { return slices.Equal(s.running(), []string{good}) })
	first := s.unit("InvocationID")
	l.killToad(t)
	op = s.await(op.ID, nil)
	s.expect(op, "failed", "rollback_failed")
	if op.Failure.Cause != "restart_budget" {
		t.Errorf("cause %s", op.Failure.Cause)
	}
	if now := s.unit("InvocationID"); now != first {
		t.Errorf("the target was started again: %s, then %s", first, now)
	}
	types := s.events()
	l.reboot(t)
	s.eventually("it is back by its own [Install]", func() bool { return slices.Equal(s.running(), []string{good}) })
	if v := s.view(); v.LastOperation.ID != op.ID || v.ActiveOperation != nil {
		t.Errorf("something was tried after the boot: %+v", v.LastOperation)
	}
	if now := s.events(); slices.Contains(now[len(types):], "rollback") || slices.Contains(now[len(types):], "activate") {
		t.Errorf("events after the end: %v", now[len(types):])
	}
	l.exec(t, `podman unshare rm "$(podman volume inspect --format '{{.Mountpoint}}' once-data)/unready"`)
	s.expect(s.deploy(s.image("VERSION=3")), "promoted", "")
}

// After promotion a crash, an exhausted start limit, lasting unreadiness and a removed image are told and
// never rolled back; outcome and health are separate facts.
func TestLabAfterPromotion(t *testing.T) {
	l := theLab(t)
	s := l.enroll(t, "after", quick, func(s *labService) {
		s.tmpl = strings.Replace(s.tmpl, "[Service]", "Volume=after-data:/data\n\n[Unit]\nStartLimitIntervalSec=60\nStartLimitBurst=8\n\n[Service]\nRestartSec=100ms", 1)
	})
	t.Cleanup(func() { l.try("podman", "volume", "rm", "-f", "after-data") })
	one := s.image("VERSION=1")
	two := s.image("VERSION=2", "UNREADY_FILE=/data/unready")
	s.promote(one)
	s.promote(two)
	told := func(typ string) {
		t.Helper()
		s.eventuallyFor(t, 90*time.Second, "event "+typ, func() bool { return slices.Contains(s.events(), typ) })
	}

	l.exec(t, "podman kill --signal KILL after")
	told("restart")
	s.eventually("it is back", func() bool { v := s.view(); return v.Health.Ready && v.Health.RestartsSincePromotion == 1 })

	volume := `"$(podman volume inspect --format '{{.Mountpoint}}' after-data)/unready"`
	l.exec(t, "podman unshare touch "+volume)
	told("unhealthy")
	if v := s.view(); v.Health.State != "running" || v.Health.Ready || v.LastOperation.State != "promoted" || v.Generation != 2 {
		t.Errorf("unready after promotion: %+v, last %s", v.Health, v.LastOperation.State)
	}
	l.exec(t, "podman unshare rm "+volume)
	told("healthy")

	// Removed by force with the registry away: loaded back, and the unit that systemd restarts finds it.
	l.root(t, "systemctl stop docker-registry")
	t.Cleanup(func() { l.root(t, "systemctl start docker-registry") })
	l.exec(t, "podman rmi --force "+two+" >/dev/null")
	told("retention-restored")
	s.eventuallyFor(t, time.Minute, "it runs again", func() bool { return s.view().Health.Ready })
	s.expectRuns(two)

	// The start limit is used up: failed stays failed, and is told.
	for range 14 {
		l.try("sh", "-c", "podman kill --signal KILL after; sleep 1")
	}
	s.eventually("failed", func() bool { return s.unit("ActiveState") == "failed" })
	s.eventuallyFor(t, time.Minute, "health says failed", func() bool { return s.view().Health.State == "failed" })
	if v := s.view(); v.LastOperation.State != "promoted" || v.Generation != 2 || slices.Contains(s.events(), "rollback") {
		t.Errorf("a failure after promotion changed the outcome: %+v", v)
	}
	if out := l.exec(t, "journalctl --user CONTAINER_NAME=toad -p err --no-pager -q -n 50"); !strings.Contains(out, "unhealthy") {
		t.Errorf("there is no alert:\n%s", out)
	}
	s.expect(s.deploy(two), "promoted", "") // and the way out is a deployment
}

// One service whose registry hangs, one whose probe hangs and one whose record is damaged: a deployment of
// another goes on beside them. The times are printed.
func TestLabIsolation(t *testing.T) { // I8
	l := theLab(t)
	free := l.enroll(t, "free", quick)
	hung, slow, broken := l.enroll(t, "hung", quick), l.enroll(t, "slow", quick, func(s *labService) {
		s.en.Readiness.Timeout, s.en.Probation.StartupDeadline, s.en.Probation.RolloutDeadline = duration(5*time.Second), 0, duration(2*time.Minute)
	}), l.enroll(t, "broken", quick)
	one, two := free.image("VERSION=1"), free.image("VERSION=2")
	free.promote(one)
	free.promote(two)
	broken.promote(broken.image("VERSION=1"))
	hungImage, slowImage := hung.image("VERSION=1"), slow.image("VERSION=1", "SLOW=30s")

	timed := func(image string) time.Duration {
		begun := time.Now()
		free.expect(free.deploy(image), "promoted", "")
		return time.Since(begun)
	}
	alone := timed(one)
	slowOp := slow.submit(slowImage)
	slow.awaitState(slowOp.ID, "probation")
	l.exec(t, "systemctl --user stop toad.service; echo garbage > .local/share/toad/services/broken/service.json; systemctl --user start toad.service")
	l.root(t, "systemctl kill --signal STOP docker-registry")
	t.Cleanup(func() { l.root(t, "systemctl kill --signal CONT docker-registry") })
	hungOp := hung.submit(hungImage)
	beside := timed(two)
	t.Logf("a deployment took %s alone and %s beside a hung registry, a hung probe and a damaged record: ratio %.2f", alone, beside, beside.Seconds()/alone.Seconds())
	if op := hung.await(hungOp.ID, func(wireOperation) bool { return true }); op.State != "preparing" {
		t.Errorf("the hung one is %s: nothing is shown", op.State)
	}
	if op := slow.await(slowOp.ID, func(wireOperation) bool { return true }); op.State != "probation" {
		t.Errorf("the slow one is %s: nothing is shown", op.State)
	}
	var p *problem
	p, err := l.call("POST", "/v1/deployments", deployRequest{Service: "broken", Image: two, ExpectedGeneration: new(int64), IdempotencyKey: "k"}, nil)
	if err != nil || p == nil || p.Code != "state_unavailable" {
		t.Errorf("the damaged one answers %+v %v", p, err)
	}
	if got := broken.running(); len(got) != 1 {
		t.Errorf("the damaged one's workload: %v", got)
	}
}
