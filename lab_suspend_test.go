package main

import (
	"slices"
	"strings"
	"testing"
)

// askFor asks something of the service, which must be taken.
func (s *labService) askFor(what string, body any) wireService {
	s.t.Helper()
	var v wireService
	if p := s.mustCall(s.t, "POST", "/v1/services/"+s.name+"/"+what, body, &v); p != nil {
		s.t.Fatalf("%s %s: %+v", what, s.name, p)
	}
	return v
}

// expectDown demands of Toad, systemd and Podman that the service is stopped and starts at no boot.
func (s *labService) expectDown() {
	s.t.Helper()
	s.eventually("it is stopped", func() bool { return s.view().Health.State == "stopped" })
	s.expectRuns()
	if st := s.unit("ActiveState"); st != "inactive" && st != "failed" {
		s.t.Fatalf("systemd says %s", st)
	}
	if f := s.unitFile(); f == "" || strings.Contains(f, "[Install]") {
		s.t.Fatalf("its unit starts at boot, or is gone:\n%s", f)
	}
}

// A suspended service stays down over reboots and whatever becomes of Toad in between, and comes back when
// it is resumed, with the registry gone.
func TestLabSuspendedOverReboots(t *testing.T) {
	l := theLab(t)
	s := l.enroll(t, "asleep", quick)
	image := s.image("VERSION=1")
	op := s.promote(image)
	s.askFor("suspend", nil)
	l.killToad(t)
	s.expectDown()
	if p := s.mustCall(t, "POST", "/v1/deployments", s.request(s.image("VERSION=2")), &op); p == nil || p.Code != "suspended" {
		t.Errorf("a deployment of a suspended service: %+v", p)
	}
	l.reboot(t)
	s.expectDown()
	s.askFor("suspend", nil)

	// Killed as soon as the suspension is accepted, and booted before anything follows from it: the unit
	// that starts at the boot is stopped.
	s.askFor("resume", nil)
	s.eventually("it is ready again", func() bool { v := s.view(); return v.Health.Ready && v.Installed })
	s.askFor("suspend", nil)
	l.killToad(t)
	l.reboot(t)
	s.expectDown()

	// Another hand starts it; the start may be cancelled while it is waited for.
	l.exec(t, "systemctl --user start --no-block asleep.service")
	s.eventually("it is stopped again", func() bool { return s.unit("ActiveState") != "active" && len(s.running()) == 0 })
	s.expectDown()

	l.loseRegistry(t)
	l.exec(t, "podman system prune --all --force")
	s.askFor("resume", nil)
	l.killToad(t)
	s.eventually("it is ready again", func() bool { v := s.view(); return v.Health.Ready && v.Installed })
	s.expectRuns(image)
	if v := s.view(); v.Generation != op.Generation || v.LastOperation.ID != op.ID {
		t.Errorf("resuming made %+v", v)
	}
	l.reboot(t)
	s.eventually("it comes up with the host", func() bool { return s.view().Health.Ready })
	s.expectRuns(image)
	asked := slices.DeleteFunc(s.events(), func(e string) bool { return e != "suspend" && e != "resume" })
	if want := []string{"suspend", "resume", "suspend", "resume"}; !slices.Equal(asked, want) {
		t.Errorf("events %v, want %v", asked, want)
	}
}

// Retiring takes instance, unit and images from the host and leaves the records; the name is free then, and
// a later enrollment goes on with its generations.
func TestLabRetired(t *testing.T) {
	l := theLab(t)
	s := l.enroll(t, "leaving", quick)
	s.promote(s.image("VERSION=1"))
	op := s.promote(s.image("VERSION=2"))
	req := retireRequest{&op.Generation}
	if p := s.mustCall(t, "POST", "/v1/services/leaving/retire", req, &wireService{}); p == nil || p.Code != "enrolled" {
		t.Fatalf("retired while it is enrolled: %+v", p)
	}
	l.exec(t, "rm .config/toad/enrollment/leaving.*")
	s.eventually("the enrollment is gone", func() bool { return !s.view().Enrollment.Valid })
	s.askFor("retire", req)
	l.killToad(t)
	s.eventually("it is retired", func() bool { v := s.view(); return v.Retired != nil && v.Retired.Done })
	s.expectRuns()
	if st := s.unit("LoadState"); st != "not-found" || s.unitFile() != "" {
		t.Errorf("its unit is %s:\n%s", st, s.unitFile())
	}
	if out, status := l.try("ls", "/home/toad/.local/share/toad/services/leaving/images"); status == 0 {
		t.Errorf("its images are still there: %s", out)
	}
	if got := s.operation(op.ID); got.State != "promoted" {
		t.Errorf("its history: %+v", got)
	}
	l.reboot(t)
	s.expectRuns()

	other := l.enroll(t, "taker", quick, func(s *labService) {
		s.tmpl = strings.Replace(s.tmpl, "ContainerName=taker", "ContainerName=leaving", 1)
	})
	other.promote(other.image("VERSION=1"))
	l.exec(t, "rm .config/toad/enrollment/taker.*")
	g := other.view().Generation
	other.eventually("the enrollment is gone", func() bool { return !other.view().Enrollment.Valid })
	other.askFor("retire", retireRequest{&g})
	other.eventually("it is retired", func() bool { v := other.view(); return v.Retired != nil && v.Retired.Done })

	s.apply()
	s.eventually("it is enrolled again", func() bool { return s.view().Enrollment.Valid })
	again := s.promote(s.image("VERSION=3"))
	if again.Generation != op.Generation+1 || again.Previous != nil {
		t.Errorf("it goes on with %+v", again)
	}
	if v := s.view(); v.Retired != nil {
		t.Errorf("it is still said to be retired: %+v", v.Retired)
	}
}

// With a barrier a pipeline that goes on after a rollback is refused, whatever generation it read, until an
// operator acknowledges the operation by name.
func TestLabBarrier(t *testing.T) { // G9
	l := theLab(t)
	s := l.enroll(t, "closed", quick, func(s *labService) { s.en.Barrier = true })
	good := s.promote(s.image("VERSION=1"))
	stale := s.request(s.image("VERSION=3"))
	op := s.deploy(s.image("CRASH=1"))
	s.expect(op, "rolled_back", "restart_budget")
	s.refused(stale, "rollback_barrier", op.ID)
	s.refused(s.request(s.image("VERSION=3")), "rollback_barrier", op.ID)
	l.killToad(t)
	if v := s.view(); v.Barrier == nil || v.Barrier.OperationID != op.ID {
		t.Fatalf("after a kill the barrier is %+v", v.Barrier)
	}
	if p := s.mustCall(t, "POST", "/v1/services/closed/reconcile", reconcileRequest{good.ID}, &wireService{}); p == nil || p.Code != "rollback_barrier" {
		t.Errorf("another operation lifts it: %+v", p)
	}
	out, status := l.toad("reconcile", "closed")
	if status != 0 || !strings.Contains(out, op.ID) {
		t.Fatalf("toad reconcile: %d %s", status, out)
	}
	s.promote(s.image("VERSION=3"))
	if got := s.events(); !slices.Contains(got, "reconcile") {
		t.Errorf("events %v", got)
	}
}

// The commands as operators type them: each waits for what it asked for, and a dry run stores nothing.
func TestLabSuspendCommands(t *testing.T) {
	t.Parallel()
	l := theLab(t)
	s := l.enroll(t, "typed", quick)
	image := s.image("VERSION=1")
	s.promote(image)
	toad := func(want int, args ...string) string {
		t.Helper()
		out, status := l.toad(args...)
		if status != want {
			t.Fatalf("toad %q: exit %d, want %d\n%s", args, status, want, out)
		}
		return out
	}
	toad(0, "suspend", "typed")
	s.expectRuns()
	if out := toad(1, "deploy", "typed", image, "--dry-run"); !strings.Contains(out, "suspended refused: suspended") {
		t.Errorf("%s", out)
	}
	toad(1, "deploy", "typed", image)
	toad(0, "resume", "typed")
	s.expectRuns(image)
	before := l.exec(t, "cd .local/share/toad/services/typed && find . -type f | sort | xargs sha256sum")
	if out := toad(0, "deploy", "typed", s.image("VERSION=2"), "--dry-run"); !strings.Contains(out, "image passed") || !strings.Contains(out, "[Container] Image= changed") {
		t.Errorf("%s", out)
	}
	missing := s.en.Repository + "@sha256:" + strings.Repeat("0", 64)
	if out := toad(1, "deploy", "typed", missing, "--dry-run"); !strings.Contains(out, "image refused: fetch_failed") {
		t.Errorf("%s", out)
	}
	if after := l.exec(t, "cd .local/share/toad/services/typed && find . -type f | sort | xargs sha256sum"); after != before {
		t.Errorf("a dry run changed something:\n%s\n%s", before, after)
	}
	toad(1, "retire", "typed")
	if out := l.exec(t, "curl -s --unix-socket .local/share/toad/run/toad.sock http://toad/metrics"); !strings.Contains(out, `toad_service_ready{service="typed"} 1`) {
		t.Errorf("metrics:\n%s", out)
	}
}
