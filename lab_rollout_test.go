package main

import (
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// withVolume gives the service a folder of the host at /vol, empty when the test begins.
func withVolume(s *labService) {
	dir := "/home/toad/volumes/" + s.name
	s.exec(s.t, "podman unshare rm -rf "+dir+" && mkdir -p "+dir)
	s.tmpl = strings.Replace(s.tmpl, "[Service]", "Volume="+dir+":/vol\n\n[Service]", 1)
}

// volume is a path on that folder, for the host.
func (s *labService) volume(file string) string { return "/home/toad/volumes/" + s.name + "/" + file }

// entered is when an operation entered each state, the last time if it did so twice.
func entered(op wireOperation) map[string]time.Time {
	m := map[string]time.Time{}
	for _, x := range op.Timeline {
		m[x.State] = time.Time(x.At)
	}
	return m
}

func states(op wireOperation) (list []string) {
	for _, x := range op.Timeline {
		list = append(list, x.State)
	}
	return list
}

// activeSince is when systemd saw the unit become active.
func (s *labService) activeSince() time.Time {
	s.t.Helper()
	out := s.exec(s.t, "systemctl --user show --timestamp=us+utc -P ActiveEnterTimestamp "+s.name+".service")
	at, err := time.Parse("Mon 2006-01-02 15:04:05.000000 MST", out)
	must(s.t, err)
	return at
}

// expectCurrent demands that this revision runs, is what starts at boot, and is what Toad calls current.
func (s *labService) expectCurrent(op wireOperation) {
	s.t.Helper()
	s.expectRuns(op.Candidate.Image)
	if f := s.unitFile(); !strings.Contains(f, "[Install]") || !strings.Contains(f, "\nImage="+op.Candidate.Image+"\n") {
		s.t.Errorf("the unit file is not that of generation %d:\n%s", op.Generation, f)
	}
	if out := s.exec(s.t, "systemctl --user is-enabled "+s.name+".service || true"); out != "generated" {
		s.t.Errorf("systemctl is-enabled says %q", out)
	}
	if out := s.exec(s.t, "systemctl --user show -P Wants default.target"); !slices.Contains(strings.Fields(out), s.name+".service") {
		s.t.Errorf("default.target does not want it: %s", out)
	}
	if v := s.view(); v.Current == nil || v.Current.Digest != op.Candidate.Digest || v.Generation != op.Generation {
		s.t.Errorf("current is %+v at generation %d, want generation %d, %s", v.Current, v.Generation, op.Generation, op.Candidate.Digest)
	}
}

// expectNothing demands that nothing of the service is on the host.
func (s *labService) expectNothing() {
	s.t.Helper()
	if out := s.exec(s.t, "podman ps --all --quiet --filter name=^"+s.name+"$"); out != "" {
		s.t.Errorf("Podman still has container %s", out)
	}
	if f := s.unitFile(); f != "" {
		s.t.Errorf("its unit file is still there:\n%s", f)
	}
	if got := s.unit("LoadState"); got != "not-found" {
		s.t.Errorf("systemd says its unit is %s", got)
	}
}

func TestLabNeverReadyIsRolledBackAtTheDeadline(t *testing.T) { // R2, R5, R6, G11
	t.Parallel()
	s := theLab(t).enroll(t, "never-ready", func(s *labService) {
		s.en.Probation.RolloutDeadline, s.en.Probation.StartupDeadline = duration(16*time.Second), 0
	})
	first := s.promote(s.image("VERSION=1"))
	op := s.submit(s.image("VERSION=2", "NEVER_READY=1"))
	s.awaitState(op.ID, "probation")
	s.eventually("the candidate runs", func() bool { return s.unit("ActiveState") == "active" })
	s.expectRuns(op.Candidate.Image)
	if strings.Contains(s.unitFile(), "[Install]") {
		t.Error("a candidate would start at boot")
	}
	// It does not fail for systemd, nor restart: only Toad's own clock can end it.
	if n := s.unitNumber("NRestarts"); n != 0 {
		t.Errorf("systemd counts %d restarts", n)
	}
	op = s.await(op.ID, nil)
	s.expect(op, "rolled_back", "rollout_deadline")
	if d := entered(op)["rolling_back"].Sub(entered(op)["activating"]); d < 16*time.Second || d > 20*time.Second {
		t.Errorf("given up %s after it was activated, want 16s", d)
	}
	if !strings.Contains(op.Failure.Summary, "16s") {
		t.Errorf("the reason does not name the limit: %s", op.Failure.Summary)
	}
	s.expectCurrent(first)
	if v := s.view(); v.Generation != first.Generation || v.Rollback != nil {
		t.Errorf("generation %d, retained %+v: a failed candidate left a trace", v.Generation, v.Rollback)
	}
}

func TestLabStartupDeadline(t *testing.T) { // R5, R11
	t.Parallel()
	s := theLab(t).enroll(t, "wrong-port", func(s *labService) { s.en.Probation.StartupDeadline = duration(5 * time.Second) })
	first := s.promote(s.image("VERSION=1"))
	op := s.deploy(s.image("VERSION=2", "PORT=8081"))
	s.expect(op, "rolled_back", "startup_deadline")
	if f := op.Failure.Summary; !strings.Contains(f, "5s") || !strings.Contains(f, "8080") {
		t.Errorf("the reason names neither the limit nor the port: %s", f)
	}
	s.expectCurrent(first)
}

func TestLabCrashLoopIsRolledBackByBudget(t *testing.T) { // R1
	t.Parallel()
	s := theLab(t).enroll(t, "crash-loop", func(s *labService) { s.en.Probation.RestartBudget = 2 })
	first := s.promote(s.image("VERSION=1"))
	op := s.deploy(s.image("VERSION=2", "EXIT_AFTER=500ms"))
	s.expect(op, "rolled_back", "restart_budget")
	if op.Restarts != 3 || op.RestartBudget != 2 {
		t.Errorf("%d of %d restarts, want 3 of 2", op.Restarts, op.RestartBudget)
	}
	if f := op.Failure.Summary; !strings.Contains(f, "3") || !strings.Contains(f, "2") {
		t.Errorf("the reason does not name the counts: %s", f)
	}
	// The third restart is counted when systemd schedules it, so Podman may not have made it.
	starts := s.exec(t, fmt.Sprintf("podman events --stream=false --since 10m --filter event=start --filter container=%s --format '{{.Image}}'", s.name))
	if n := strings.Count(starts, op.Candidate.Digest); n != 3 && n != 4 {
		t.Errorf("Podman started the candidate %d times, Toad counts %d restarts", n, op.Restarts)
	}
	s.expectCurrent(first)
}

func TestLabReadyThenRestartedBeginsTheWindowAgain(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "once-more", withVolume, func(s *labService) { s.en.Probation.StabilityWindow = duration(4 * time.Second) })
	op := s.submit(s.image("VERSION=1", "EXIT_ONCE=3s", "MARKER=/vol/exited"))
	s.awaitState(op.ID, "probation")
	s.await(op.ID, func(op wireOperation) bool { return op.ReadyForSeconds > 0 })
	before := s.unit("InvocationID")
	op = s.await(op.ID, nil)
	s.expect(op, "promoted", "")
	after, n, since := s.unit("InvocationID"), s.unitNumber("NRestarts"), s.activeSince()
	if after == before || n != 1 || op.Restarts != 1 {
		t.Errorf("invocations %s and %s, systemd counts %d restarts and Toad %d, want two and one", before, after, n, op.Restarts)
	}
	if d := entered(op)["promoted"].Sub(since); d < 4*time.Second {
		t.Errorf("promoted %s after its last start: less than the window", d)
	}
	if d := entered(op)["promoted"].Sub(entered(op)["probation"]); d < 7*time.Second {
		t.Errorf("promoted %s after its first start: it was ready for 3s, and then for the window of 4s", d)
	}
	if op.ReadyForSeconds < 4 {
		t.Errorf("ready for %gs", op.ReadyForSeconds)
	}
	if log := s.log(op.ID); !strings.Contains(log, "begins again") || !strings.Contains(log, "1 of 1 restarts") {
		t.Errorf("the log does not tell it:\n%s", log)
	}
}

func TestLabNoPreviousRevision(t *testing.T) { // S7
	t.Parallel()
	s := theLab(t).enroll(t, "no-previous")
	op := s.deploy(s.image("VERSION=1", "CRASH=1"))
	s.expect(op, "failed", "no_rollback_target")
	if op.Failure.Cause != "restart_budget" {
		t.Errorf("cause is %q", op.Failure.Cause)
	}
	s.expectNothing()
	if v := s.view(); v.Current != nil || v.Generation != 0 {
		t.Errorf("current is %+v, generation %d", v.Current, v.Generation)
	}
	s.expectCurrent(s.promote(s.image("VERSION=2"))) // S6: a good one deploys at once
}

func TestLabThirdThatFailsGoesBackToTheSecond(t *testing.T) { // R6
	t.Parallel()
	s := theLab(t).enroll(t, "third")
	s.promote(s.image("VERSION=1"))
	second := s.promote(s.image("VERSION=2"))
	op := s.deploy(s.image("VERSION=3", "CRASH=1"))
	s.expect(op, "rolled_back", "restart_budget")
	if op.Previous == nil || op.Previous.Generation != second.Generation {
		t.Errorf("target was %+v", op.Previous)
	}
	s.expectCurrent(second)
	if v := s.view(); v.Rollback == nil || v.Rollback.Generation != 1 {
		t.Errorf("retained is %+v, want generation 1", v.Rollback)
	}
	s.eventually("it is seen ready", func() bool { return s.view().Health.Ready })
}

func TestLabFailedRollbackIsTerminal(t *testing.T) { // G7
	t.Parallel()
	s := theLab(t).enroll(t, "twice-broken", withVolume, func(s *labService) {
		s.en.Probation.RolloutDeadline, s.en.Probation.StartupDeadline = duration(16*time.Second), 0
	})
	first := s.promote(s.image("VERSION=1", "UNREADY_FILE=/vol/broken"))
	s.exec(t, "touch "+s.volume("broken"))
	op := s.deploy(s.image("VERSION=2", "CRASH=1"))
	s.expect(op, "failed", "rollback_failed")
	if op.Failure.Cause != "restart_budget" {
		t.Errorf("cause is %q", op.Failure.Cause)
	}
	if want := []string{"preparing", "activating", "probation", "rolling_back", "failed"}; !slices.Equal(states(op), want) {
		t.Errorf("states were %v", states(op))
	}
	// What was started is systemd's: it runs, it is started no second time, and once it is whole it serves.
	s.expectRuns(first.Candidate.Image)
	invocation := s.unit("InvocationID")
	s.exec(t, "rm "+s.volume("broken"))
	s.eventually("it is seen ready", func() bool { return s.view().Health.Ready })
	if now := s.unit("InvocationID"); now != invocation {
		t.Errorf("it was started again: %s, then %s", invocation, now)
	}
	if again := s.await(op.ID, nil); again.State != "failed" || !slices.Equal(states(again), states(op)) {
		t.Errorf("the operation went on: %v", states(again))
	}
	s.expectCurrent(s.promote(s.image("VERSION=3")))
}

func TestLabRefusedRequestsTouchNothing(t *testing.T) { // G9
	t.Parallel()
	s := theLab(t).enroll(t, "refused")
	image := s.image("VERSION=1")
	req := s.request(image)
	var first wireOperation
	if p := s.mustCall(t, "POST", "/v1/deployments", req, &first); p != nil {
		t.Fatalf("%+v", p)
	}
	s.expect(s.await(first.ID, nil), "promoted", "")
	s.eventually("the unit is installed", func() bool { return s.view().Installed })
	invocation := s.unit("InvocationID")

	var op wireOperation
	if p := s.mustCall(t, "POST", "/v1/deployments", req, &op); p != nil || op.ID != first.ID || op.State != "promoted" {
		t.Errorf("repeated key: %+v, operation %s %s, want %s", p, op.ID, op.State, first.ID)
	}
	other := req
	other.Image = s.image("VERSION=2")
	if p := s.mustCall(t, "POST", "/v1/deployments", other, &op); p == nil || p.Code != "key_reused" || p.Status != 422 || p.OperationID != first.ID {
		t.Errorf("key with other input: %+v", p)
	}
	stale := s.request(other.Image)
	*stale.ExpectedGeneration = 0
	if p := s.mustCall(t, "POST", "/v1/deployments", stale, &op); p == nil || p.Code != "stale_generation" || p.Status != 409 || p.CurrentGeneration == nil || *p.CurrentGeneration != 1 {
		t.Errorf("stale generation: %+v", p)
	}
	foreign := s.request(strings.Replace(image, s.name, "elsewhere", 1))
	if p := s.mustCall(t, "POST", "/v1/deployments", foreign, &op); p == nil || p.Code != "repository_not_allowed" || p.Status != 422 {
		t.Errorf("another repository: %+v", p)
	}
	if now := s.unit("InvocationID"); now != invocation {
		t.Error("a refused request restarted the instance")
	}
	if v := s.view(); v.LastOperation == nil || v.LastOperation.ID != first.ID || v.ActiveOperation != nil {
		t.Errorf("a refused request left an operation: %+v", v)
	}

	// Of requests at the same time one is accepted, and the others are told which.
	var wg sync.WaitGroup
	problems, accepted := make([]*problem, 5), make([]wireOperation, 5)
	for i := range problems {
		r := s.request(other.Image)
		wg.Go(func() { problems[i], _ = s.call("POST", "/v1/deployments", r, &accepted[i]) })
	}
	wg.Wait()
	var id string
	for i := range problems {
		if problems[i] == nil {
			if id != "" {
				t.Fatalf("two were accepted: %s and %s", id, accepted[i].ID)
			}
			id = accepted[i].ID
		}
	}
	for _, p := range problems {
		if p != nil && (p.Code != "rollout_active" || p.OperationID != id) {
			t.Errorf("concurrent request: %+v, want rollout_active by %s", p, id)
		}
	}
	last := s.await(id, nil)
	s.expect(last, "promoted", "")
	s.eventually("the unit is installed", func() bool { return s.view().Installed })
	s.expectCurrent(last)
}

func TestLabRollbackRequestEndsTheProbation(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "asked")
	first := s.promote(s.image("VERSION=1"))
	op := s.submit(s.image("VERSION=2", "NEVER_READY=1"))
	s.awaitState(op.ID, "probation")
	if p := s.mustCall(t, "POST", "/v1/operations/"+op.ID+"/rollback", nil, &op); p != nil || !op.RollbackRequested {
		t.Fatalf("%+v %+v", p, op)
	}
	op = s.await(op.ID, nil)
	s.expect(op, "rolled_back", "requested")
	if d := entered(op)["rolling_back"].Sub(entered(op)["probation"]); d > 8*time.Second {
		t.Errorf("it took %s to begin", d)
	}
	s.expectCurrent(first)
	if p := s.mustCall(t, "POST", "/v1/operations/"+op.ID+"/rollback", nil, &op); p == nil || p.Code != "not_rollbackable" {
		t.Errorf("of an ended operation: %+v", p)
	}
}

func TestLabRollbackOfAPromotedRevision(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "back-again")
	first := s.image("VERSION=1")
	s.promote(first)
	second := s.promote(s.image("VERSION=2"))
	g := second.Generation
	var op wireOperation
	req := rollbackRequest{ExpectedGeneration: &g, IdempotencyKey: "undo"}
	if p := s.mustCall(t, "POST", "/v1/services/back-again/rollback", req, &op); p != nil {
		t.Fatalf("%+v", p)
	}
	op = s.await(op.ID, nil)
	s.expect(op, "promoted", "")
	if op.Candidate.Image != first || op.Generation != 3 {
		t.Errorf("deployed %s as generation %d", op.Candidate.Image, op.Generation)
	}
	s.eventually("the unit is installed", func() bool { return s.view().Installed })
	s.expectCurrent(op)
	g = op.Generation
	if p := s.mustCall(t, "POST", "/v1/services/back-again/rollback", rollbackRequest{&g, "undo-the-undo"}, &op); p == nil || p.Code != "not_rollbackable" {
		t.Errorf("a second one: %+v", p)
	}
}

func TestLabServicesDoNotDelayEachOther(t *testing.T) { // I8
	t.Parallel()
	l := theLab(t)
	long := func(s *labService) { s.en.Probation.StabilityWindow = duration(10 * time.Second) }
	var both []*labService
	var images []string
	for _, name := range []string{"one", "other"} {
		s := l.enroll(t, name, long)
		both, images = append(both, s), append(images, s.image("VERSION="+name))
	}
	took := func(op wireOperation) time.Duration {
		both[0].expect(op, "promoted", "")
		return time.Time(*op.FinishedAt).Sub(time.Time(op.CreatedAt))
	}
	alone := took(both[0].deploy(images[0]))
	var ids [2]string
	for i, s := range both {
		ids[i] = s.submit(images[i]).ID
	}
	var longest time.Duration
	var ops [2]wireOperation
	for i, s := range both {
		ops[i] = s.await(ids[i], nil)
		longest = max(longest, took(ops[i]))
	}
	t.Logf("alone %s, the slower of two at once %s: %.2f times", alone, longest, longest.Seconds()/alone.Seconds())
	if longest.Seconds() > 1.6*alone.Seconds() {
		t.Errorf("two at once take %s, one alone %s", longest, alone)
	}
	for i := range ops { // each was on probation while the other was
		if !entered(ops[i])["probation"].Before(entered(ops[1-i])["promoting"]) {
			t.Errorf("one waited for the other: %v %v", ops[0].Timeline, ops[1].Timeline)
		}
	}
}

func TestLabClientGoneAfterSubmitting(t *testing.T) { // E3
	t.Parallel()
	s := theLab(t).enroll(t, "client-gone")
	image := s.image("VERSION=1")
	body, err := json.Marshal(s.request(image))
	must(t, err)
	conn, err := net.Dial("unix", s.path("/home/toad/.local/share/toad/run/toad.sock"))
	must(t, err)
	_, err = fmt.Fprintf(conn, "POST /v1/deployments HTTP/1.1\r\nHost: toad\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	must(t, err)
	time.Sleep(10 * time.Millisecond) // the case itself
	conn.Close()
	var id string
	s.eventually("the operation is there", func() bool {
		v := s.view()
		if v.ActiveOperation != nil {
			id = v.ActiveOperation.ID
		}
		return id != ""
	})
	op := s.await(id, nil)
	s.expect(op, "promoted", "")
	s.expectRuns(image)
}

func TestLabHistoryAnswers(t *testing.T) { // E12
	t.Parallel()
	s := theLab(t).enroll(t, "history")
	begun := time.Now().Add(-time.Second)
	ops := []wireOperation{s.promote(s.image("VERSION=1")), s.deploy(s.image("VERSION=2", "CRASH=1"))}
	out, status := s.toad("history", s.name, "--json")
	var list wireOperations
	if status != 0 {
		t.Fatalf("exit %d: %s", status, out)
	}
	must(t, json.Unmarshal([]byte(out), &list))
	if len(list.Operations) != 2 {
		t.Fatalf("%d operations", len(list.Operations))
	}
	for i, got := range list.Operations { // newest first
		want := ops[1-i]
		if got.Candidate.Digest != want.Candidate.Digest || got.Generation != want.Generation || got.RequestedBy != "local" || got.State != want.State ||
			time.Time(got.CreatedAt).Before(begun) || got.FinishedAt == nil || (got.Failure == nil) != (want.Failure == nil) {
			t.Errorf("history has %+v, want %+v", got, want)
		}
	}
	if f := list.Operations[0].Failure; f == nil || f.Code != "restart_budget" || f.Summary == "" {
		t.Errorf("why: %+v", f)
	}
	text, _ := s.toad("history", s.name)
	for _, part := range []string{shortDigest(ops[0].Candidate.Digest), shortDigest(ops[1].Candidate.Digest), "local", "promoted", "rolled_back", "restart_budget", clockText(ops[0].CreatedAt)} {
		if !strings.Contains(text, part) {
			t.Errorf("%q is not in\n%s", part, text)
		}
	}
}

// toad runs the wrapper as the toad user; standard output alone is returned when it is JSON.
func (l *lab) toad(args ...string) (string, int) {
	cmd := l.lab(append([]string{"exec", "toad"}, args...)...)
	if slices.Contains(args, "--json") {
		out, _ := cmd.Output()
		return string(out), cmd.ProcessState.ExitCode()
	}
	out, _ := cmd.CombinedOutput()
	return string(out), cmd.ProcessState.ExitCode()
}

func TestLabWrapper(t *testing.T) { // G11
	t.Parallel()
	s := theLab(t).enroll(t, "wrapped", func(s *labService) { s.en.Probation.RestartBudget = 0 })
	good, bad := s.image("VERSION=1"), s.image("VERSION=2", "CRASH=1")
	run := func(want int, args ...string) string {
		t.Helper()
		out, status := s.try(args...)
		if status != want {
			t.Errorf("%s: exit %d, want %d\n%s", strings.Join(args, " "), status, want, out)
		}
		return out
	}
	run(3, "toad", "deploy", s.name, bad) // nothing to go back to
	s.expectNothing()
	run(0, "--root", "toad", "deploy", s.name, good)
	s.expectRuns(good)
	run(4, "toad", "deploy", s.name, bad)
	s.expectRuns(good)
	run(1, "toad", "deploy", s.name, good, "--expect", "77")
	run(1, "--root", "toad", "status", "nothing-of-this-name")
	run(2, "toad", "deploy", s.name)
	run(2, "--root", "toad", "no-such-command")
	run(0, "toad", "version")
	for _, who := range [][]string{nil, {"--root"}} {
		cmd := s.lab.lab(append(append([]string{"exec"}, who...), "toad", "status", s.name, "--json")...)
		out, err := cmd.Output()
		var v wireService
		if err != nil || json.Unmarshal(out, &v) != nil || v.Current == nil || v.Current.Image != good {
			t.Errorf("status --json %v: %v\n%s", who, err, out)
		}
	}
	out, status := s.toad("deploy", s.name, good, "--expect", "77", "--json")
	var p problem
	if json.Unmarshal([]byte(out), &p) != nil || p.Code != "stale_generation" || status != 1 {
		t.Errorf("a refusal with --json: exit %d\n%s", status, out)
	}

	// A directory to check is seen by its own name, and nothing of it is taken up.
	s.exec(t, "mkdir -p ~/check/fine ~/check/broken && cp ~/.config/toad/enrollment/wrapped.* ~/check/fine && cp ~/check/fine/* ~/check/broken")
	s.write(t, "check/broken/wrapped.json", `{"version": 1, "service": "wrapped", "surprise": true}`)
	if out := run(0, "toad", "check", "/home/toad/check/fine"); !strings.Contains(out, "wrapped") {
		t.Errorf("check says:\n%s", out)
	}
	if out := run(1, "--root", "toad", "check", "/home/toad/check/broken"); !strings.Contains(out, "surprise") {
		t.Errorf("check says:\n%s", out)
	}
	run(0, "sh", "-c", "cd ~/check && toad check fine")
	run(1, "toad", "check", "/home/toad/check/nowhere")
}

func TestLabInterruptedClient(t *testing.T) { // E2
	t.Parallel()
	s := theLab(t).enroll(t, "interrupted", func(s *labService) { s.en.Probation.StabilityWindow = duration(8 * time.Second) })
	image := s.image("VERSION=1")
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		cmd := s.lab.lab("exec", "toad", "deploy", s.name, image)
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		must(t, cmd.Start())
		var id string
		s.eventually("its operation is on probation", func() bool {
			v := s.view()
			if v.ActiveOperation != nil && v.ActiveOperation.State == "probation" {
				id = v.ActiveOperation.ID
			}
			return id != ""
		})
		must(t, cmd.Process.Signal(sig))
		_ = cmd.Wait()
		if status := cmd.ProcessState.ExitCode(); status != 130 {
			t.Errorf("%s: exit %d\n%s", sig, status, out.String())
		}
		if !strings.Contains(out.String(), "toad watch "+id) {
			t.Errorf("%s: it does not say how to go on:\n%s", sig, out.String())
		}
		text, status := s.toad("watch", id) // the operation went on
		if status != 0 {
			t.Errorf("watch: exit %d\n%s", status, text)
		}
		s.eventually("nothing of the client is left", func() bool {
			out, _ := s.try("sh", "-c", "ps -eo args | grep -c '^/toad [d]eploy "+s.name+"'")
			return out == "0"
		})
		s.expectRuns(image)
	}
}

// From here on nobody else may be at work: these kill Toad, stop the registry or boot the host.

// holdToad ends Toad as a kill does and keeps it down until release.
func (l *lab) holdToad(t *testing.T) (release func()) {
	t.Helper()
	l.exec(t, "podman kill --signal KILL toad; systemctl --user stop toad.service")
	if out := l.exec(t, "podman ps --quiet --filter name=^toad$"); out != "" {
		t.Fatalf("toad still runs: %s", out)
	}
	return func() {
		t.Helper()
		l.exec(t, "systemctl --user start toad.service")
	}
}

func TestLabDeadlineAndCountSurviveAKill(t *testing.T) { // R9
	s := theLab(t).enroll(t, "survivor", withVolume, func(s *labService) {
		s.en.Probation.RolloutDeadline, s.en.Probation.StartupDeadline, s.en.Probation.RestartBudget = duration(40*time.Second), 0, 3
	})
	first := s.promote(s.image("VERSION=1"))
	op := s.submit(s.image("VERSION=2", "NEVER_READY=1", "EXIT_ONCE=1s", "MARKER=/vol/exited"))
	s.awaitState(op.ID, "probation")
	before := s.await(op.ID, func(op wireOperation) bool { return op.Restarts == 1 })
	s.killToad(t)
	s.eventually("toad is started again", func() bool { return strings.Contains(s.log(op.ID), "continues in state probation") })
	after := s.await(op.ID, func(op wireOperation) bool { return true })
	if after.Restarts != 1 || after.DeadlineAt == nil || *after.DeadlineAt != *before.DeadlineAt {
		t.Errorf("after the kill: %d restarts, deadline %v, before %d and %v", after.Restarts, after.DeadlineAt, before.Restarts, before.DeadlineAt)
	}
	// A restart that nobody watched counts too.
	invocation := s.unit("InvocationID")
	release := s.holdToad(t)
	s.exec(t, "podman kill --signal KILL "+s.name)
	s.eventually("systemd starts it again", func() bool { return s.unit("ActiveState") == "active" && s.unit("InvocationID") != invocation })
	release()
	after = s.await(op.ID, func(op wireOperation) bool { return op.Restarts >= 2 })
	if n := s.unitNumber("NRestarts"); after.Restarts != 2 || n != 2 {
		t.Errorf("Toad counts %d restarts, systemd %d, want 2", after.Restarts, n)
	}
	op = s.await(op.ID, nil)
	s.expect(op, "rolled_back", "rollout_deadline")
	if d := entered(op)["rolling_back"].Sub(time.Time(*before.DeadlineAt)); d < 0 || d > 5*time.Second {
		t.Errorf("rolled back %s after the original deadline", d)
	}
	s.expectCurrent(first)
}

func TestLabDeadlinePassedWhileKilled(t *testing.T) { // R3
	s := theLab(t).enroll(t, "missed", func(s *labService) {
		s.en.Probation.RolloutDeadline, s.en.Probation.StartupDeadline = duration(20*time.Second), 0
	})
	first := s.promote(s.image("VERSION=1"))
	op := s.submit(s.image("VERSION=2", "READY_AFTER=18s"))
	op = s.awaitState(op.ID, "probation")
	// The case itself: shortly before the deadline, as far as a kill on a busy machine can aim.
	time.Sleep(time.Until(time.Time(*op.DeadlineAt).Add(-6 * time.Second)))
	release := s.holdToad(t)
	if !time.Now().Before(time.Time(*op.DeadlineAt)) {
		t.Fatal("this machine took more than 6s to kill it: nothing is proven")
	}
	time.Sleep(time.Until(time.Time(*op.DeadlineAt).Add(2 * time.Second)))
	s.expectRuns(op.Candidate.Image) // it is ready by now, and has lost all the same
	started := time.Now()
	release()
	op = s.await(op.ID, nil)
	s.expect(op, "rolled_back", "rollout_deadline")
	if d := entered(op)["rolling_back"].Sub(started); d > 8*time.Second {
		t.Errorf("it took %s to see that the deadline had passed", d)
	}
	s.expectCurrent(first)
}

func TestLabKilledInEveryState(t *testing.T) { // E1, E2, G10
	l := theLab(t)
	for i, c := range []struct {
		state, end string
		old, env   []string
	}{
		// Each image makes its state last until the kill has come through.
		{"preparing", "promoted", nil, nil},
		{"activating", "promoted", []string{"IGNORE_TERM=1"}, nil},
		{"probation", "promoted", nil, nil},
		{"promoting", "promoted", nil, []string{"SLOW=2s"}},
		{"promoted", "promoted", nil, nil},
		{"rolling_back", "rolled_back", nil, []string{"EXIT_AFTER=2500ms", "IGNORE_TERM=1"}},
	} {
		if !today(i) {
			continue
		}
		t.Run(c.state, func(t *testing.T) {
			s := l.enroll(t, "killed-"+strings.ReplaceAll(c.state, "_", "-"), func(s *labService) {
				s.en.Readiness.Timeout, s.en.Probation.RestartBudget = duration(3*time.Second), 0
				s.en.Probation.RolloutDeadline, s.en.Probation.StartupDeadline = duration(time.Minute), 0
			})
			first := s.promote(s.image(append([]string{"VERSION=1"}, c.old...)...))
			image := s.image(append([]string{"VERSION=2"}, c.env...)...)
			if c.state == "preparing" {
				s.root(t, "systemctl kill --signal STOP docker-registry")
				t.Cleanup(func() { s.try("--root", "systemctl", "kill", "--signal", "CONT", "docker-registry") })
			}
			op := s.submit(image)
			if c.state != "preparing" {
				s.awaitState(op.ID, c.state)
			}
			s.killToad(t)
			if c.state == "preparing" {
				s.root(t, "systemctl kill --signal CONT docker-registry")
			}
			op = s.await(op.ID, nil)
			code := ""
			if c.end == "rolled_back" {
				code = "restart_budget"
			}
			s.expect(op, c.end, code)
			if c.state != "promoted" && !strings.Contains(s.log(op.ID), "continues in state "+c.state) {
				t.Errorf("it was not killed in state %s:\n%s", c.state, s.log(op.ID))
			}
			s.eventually("the unit is installed", func() bool { return s.view().Installed })
			if c.end == "promoted" {
				s.expectCurrent(op)
			} else {
				s.expectCurrent(first)
			}
			if v := s.view(); v.ActiveOperation != nil {
				t.Errorf("an operation is still active: %+v", v.ActiveOperation)
			}
			s.expectCurrent(s.promote(s.image("VERSION=3"))) // no stale lock
		})
	}
}

func TestLabReboot(t *testing.T) { // S7
	l := theLab(t)
	promoted := l.enroll(t, "stays")
	stays := promoted.promote(promoted.image("VERSION=1"))
	failed := l.enroll(t, "failed-first")
	failed.expect(failed.deploy(failed.image("CRASH=1")), "failed", "no_rollback_target")
	again := l.enroll(t, "starts-again", func(s *labService) {
		s.en.Probation.RolloutDeadline, s.en.Probation.StartupDeadline = duration(5*time.Minute), 0
		s.en.Probation.StabilityWindow = duration(20 * time.Second)
	})
	image := again.image("VERSION=1")
	late := l.enroll(t, "too-late", func(s *labService) {
		s.en.Probation.RolloutDeadline, s.en.Probation.StartupDeadline = duration(15*time.Second), 0
	})
	before := late.promote(late.image("VERSION=1"))

	lateOp := late.submit(late.image("VERSION=2", "NEVER_READY=1"))
	op := again.submit(image)
	lateOp = late.awaitState(lateOp.ID, "probation")
	op = again.awaitState(op.ID, "probation")
	again.eventually("the candidate runs", func() bool { return len(again.running()) == 1 })

	// Toad is kept from starting, to see what the host does without it.
	l.exec(t, "ln -s /dev/null ~/.config/systemd/user/toad.service")
	t.Cleanup(func() {
		l.try("sh", "-c", "rm -f ~/.config/systemd/user/toad.service; systemctl --user daemon-reload; systemctl --user start toad.service")
	})
	l.reboot(t)
	promoted.eventually("the promoted service is back", func() bool {
		return promoted.unit("ActiveState") == "active" && slices.Equal(promoted.running(), []string{stays.Candidate.Image})
	})
	for _, s := range []*labService{again, late} {
		if got := s.unit("ActiveState"); got != "inactive" {
			t.Errorf("candidate of %s is %s without Toad", s.name, got)
		}
		if out := s.running(); len(out) != 0 {
			t.Errorf("candidate of %s runs without Toad: %v", s.name, out)
		}
	}
	failed.expectNothing()
	time.Sleep(time.Until(time.Time(*lateOp.DeadlineAt).Add(time.Second)))

	l.exec(t, "rm ~/.config/systemd/user/toad.service && systemctl --user daemon-reload && systemctl --user start toad.service")
	op = again.await(op.ID, nil)
	again.expect(op, "promoted", "")
	if op.Restarts != 0 {
		t.Errorf("a start by Toad counts as %d restarts", op.Restarts)
	}
	if d := entered(op)["promoted"].Sub(again.activeSince()); d < 20*time.Second {
		t.Errorf("promoted %s after its start since the boot: less than the window", d)
	}
	again.eventually("the unit is installed", func() bool { return again.view().Installed })
	again.expectCurrent(op)
	lateOp = late.await(lateOp.ID, nil)
	late.expect(lateOp, "rolled_back", "rollout_deadline")
	late.expectCurrent(before)
	failed.expectNothing()
	promoted.expectCurrent(stays)
	promoted.eventually("it is seen ready", func() bool { return promoted.view().Health.Ready })
}

func TestLabServerOutOfReach(t *testing.T) {
	s := theLab(t).enroll(t, "reachless")
	release := s.holdToad(t)
	for _, who := range [][]string{nil, {"--root"}} {
		if out, status := s.try(append(who, "toad", "status")...); status != 5 {
			t.Errorf("with no server %v: exit %d\n%s", who, status, out)
		}
	}
	if out, status := s.try("toad", "check", "/home/toad/.config/toad/enrollment"); status != 0 {
		t.Errorf("check needs no server: exit %d\n%s", status, out)
	}
	// What earlier tests took from the host is found; of this service there is nothing to find.
	fsck := func(who ...string) {
		t.Helper()
		cmd := s.lab.lab(append(append([]string{"exec"}, who...), "toad", "fsck", "--json")...)
		out, _ := cmd.Output()
		var answer wireFsck
		status := cmd.ProcessState.ExitCode()
		if err := json.Unmarshal(out, &answer); err != nil || status > 1 || answer.OK != (status == 0) ||
			slices.ContainsFunc(answer.Findings, func(f finding) bool { return f.Service == s.name }) {
			t.Errorf("fsck %v: exit %d, %v\n%s", who, status, err, out)
		}
	}
	fsck() // in a container of its own
	fsck("--root")
	if out, status := s.try("toad", "audit", "verify"); status > 1 || !strings.Contains(out, "events.jsonl: whole, ") {
		t.Errorf("audit needs no server: exit %d\n%s", status, out)
	}
	release()
	fsck()
	if out, status := s.try("toad", "status", s.name); status != 0 {
		t.Errorf("exit %d\n%s", status, out)
	}
}

// TestLabTerminal: a terminal goes through the wrapper, and its Ctrl-C comes back.
func TestLabTerminal(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "terminal", func(s *labService) { s.en.Probation.StabilityWindow = duration(8 * time.Second) })
	image := s.image("VERSION=1")
	// script(1) is the terminal; what it reads is typed on it.
	cmd := s.lab.lab("exec", "script", "--quiet", "--return", "--command", "toad deploy "+s.name+" "+image, "/dev/null")
	keyboard, err := cmd.StdinPipe()
	must(t, err)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	must(t, cmd.Start())
	var id string
	s.eventually("the window has begun", func() bool {
		v := s.view()
		if v.ActiveOperation != nil && v.ActiveOperation.ReadyForSeconds > 2 {
			id = v.ActiveOperation.ID
		}
		return id != ""
	})
	_, err = keyboard.Write([]byte{3}) // Ctrl-C
	must(t, err)
	_ = cmd.Wait()
	if status := cmd.ProcessState.ExitCode(); status != 130 {
		t.Errorf("exit %d", status)
	}
	for _, part := range []string{"probation [", " of 8s ready", "toad watch " + id} {
		if !strings.Contains(out.String(), part) {
			t.Errorf("%q is not in\n%q", part, out.String())
		}
	}
	s.expect(s.await(id, nil), "promoted", "")
}

// BenchmarkLabDowntime prints what a deployment costs: how long a client that asks the published port
// every 5 ms goes without an answer, next to a restart of the same unit by systemctl; the time from the
// last look that was needed to the promotion; and what the idle server takes of memory.
func BenchmarkLabDowntime(b *testing.B) {
	s := theLab(b).enroll(b, "measured", func(s *labService) {
		s.tmpl = strings.Replace(s.tmpl, "[Service]", "PublishPort=127.0.0.1:18080:8080\n\n[Service]", 1)
	})
	images := []string{s.image("VERSION=1"), s.image("VERSION=2")}
	s.promote(images[0])
	program := s.exec(b, "ls -t ~/.cache/lab/tapp-* | head -n 1")
	gap := func(do func()) float64 {
		cmd := s.lab.lab("exec", program, "poll", "http://127.0.0.1:18080/ready")
		in, err := cmd.StdinPipe()
		must(b, err)
		var out strings.Builder
		cmd.Stdout = &out
		must(b, cmd.Start())
		time.Sleep(500 * time.Millisecond) // the client has had answers
		do()
		time.Sleep(500 * time.Millisecond) // and has them again
		in.Close()
		must(b, cmd.Wait())
		var ms float64
		if _, err := fmt.Sscan(out.String(), &ms); err != nil || ms == 0 {
			b.Fatalf("the client says %q", out.String())
		}
		return ms
	}
	answers := func() bool {
		_, status := s.try("curl", "-sf", "http://127.0.0.1:18080/ready")
		return status == 0
	}
	var restarts, deploys, commits, seen []float64
	for i := range 5 {
		restarts = append(restarts, gap(func() {
			s.exec(b, "systemctl --user restart measured.service")
			s.eventually("it answers", answers)
		}))
		deploys = append(deploys, gap(func() {
			op := s.submit(images[(i+1)%2])
			op = s.awaitState(op.ID, "promoting")
			op = s.await(op.ID, nil)
			now := time.Now()
			s.expect(op, "promoted", "")
			commits = append(commits, entered(op)["promoted"].Sub(entered(op)["promoting"]).Seconds()*1000)
			seen = append(seen, now.Sub(entered(op)["promoting"]).Seconds()*1000)
		}))
		s.eventually("the unit is installed", func() bool { return s.view().Installed })
	}
	median := func(v []float64) float64 {
		b.Logf("%v", v)
		slices.Sort(v)
		return v[len(v)/2]
	}
	r, d := median(restarts), median(deploys)
	b.ReportMetric(r, "ms-gap-of-restart")
	b.ReportMetric(d, "ms-gap-of-deploy")
	b.ReportMetric(d/r, "deploy/restart")
	b.ReportMetric(median(commits), "ms-last-look-to-promoted")
	b.ReportMetric(median(seen), "ms-last-look-to-client")
	b.ReportMetric(0, "ns/op")
	rss := s.exec(b, `awk '/VmRSS/ { print $2 }' /proc/$(podman inspect --format '{{.State.Pid}}' toad)/status`)
	var kib float64
	_, err := fmt.Sscan(rss, &kib)
	must(b, err)
	b.ReportMetric(kib/1024, "MiB-resident")
}
