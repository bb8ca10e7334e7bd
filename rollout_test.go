package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const testRepository = "registry.example.org/apps/hello"

// canary is what nobody but the host's operator may read: an environment value, and the text of errors.
const canary = "canary-in-the-mine"

// testTemplate starts at boot and has no restart policy of its own: the in-memory host restarts.
const testTemplate = `[Container]
ContainerName=hello
Environment=PASSWORD=` + canary + `
Network=apps.network
StopTimeout=2

[Service]
TimeoutStopSec=5

[Install]
WantedBy=default.target
`

func testEnrollment(service string) enrolled {
	e := enrolled{enrollment: enrollment{
		Version: 1, Service: service, Unit: service + ".container", Repository: testRepository, ImageLimit: 1 << 30,
		Readiness:     readiness{Port: 8080, Path: "/ready", Network: "apps", Interval: duration(time.Second), Timeout: duration(2 * time.Second)},
		Probation:     probation{RolloutDeadline: duration(2 * time.Minute), StabilityWindow: duration(30 * time.Second), RestartBudget: 1, StartupDeadline: duration(time.Minute)},
		FetchDeadline: duration(10 * time.Minute), StopDeadline: duration(30 * time.Second),
	}, Template: []byte(strings.ReplaceAll(testTemplate, "hello", service)), Hash: "h1", ContainerName: service, NetworkName: "systemd-apps"}
	return e
}

// world is one service on the in-memory host, in a synctest bubble. Every write of its record and every
// mutation of the host is checked against the invariants.
type world struct {
	t      testing.TB
	h      *fakeHost
	en     enrolled
	enErr  error
	dir    string
	data   *dataDir
	s      *service
	cancel context.CancelFunc
	done   chan struct{}
	keys   int

	spoil func(step, path string) error // makes a durable step fail
	dead  bool                          // Toad was killed: nothing of this incarnation acts any more
	died  chan struct{}                 // closed when it is

	// of the exploration
	up        bool
	accepted  []string
	countdown int
	variant   string
	pick      func(name string) bool
	seen      func(name string)

	judging sync.Mutex

	mu     sync.Mutex // guards last
	last   *record
	starts map[string]int // starts of the target, by operation in rolling_back and boot
}

func newWorld(t testing.TB) *world { return newWorldOn(t, newFakeHost(t), "hello") }

func newWorldOn(t testing.TB, h *fakeHost, service string) *world {
	w := &world{t: t, h: h, en: testEnrollment(service), dir: filepath.Join(t.TempDir(), "data"), starts: map[string]int{}}
	must(t, os.Mkdir(w.dir, 0o700))
	h.data = w.dir
	w.start()
	return w
}

// inWorld runs a test of one service.
func inWorld(t *testing.T, f func(t *testing.T, w *world)) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		defer func() { w.stop() }()
		f(t, w)
	})
}

// start is the start of Toad.
func (w *world) start() {
	w.t.Helper()
	var err error
	w.data, err = openData(w.dir, w.h.quadlets)
	must(w.t, err)
	host := w.h.host()
	w.set(func() { w.dead, w.died = false, make(chan struct{}) })
	host.units, host.containers = policed{w.h, w}, policed{w.h, w}
	log := slog.New(slog.NewTextHandler(testWriter{w.t}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	w.s = newService(w.en.Service, w.data, host, w.enroll, log)
	testingOnlyBoundary = w.boundary
	var ctx context.Context
	ctx, w.cancel = context.WithCancel(context.Background())
	w.done = make(chan struct{})
	s, done := w.s, w.done
	go func() { defer close(done); s.run(ctx) }()
	synctest.Wait()
}

// stop ends Toad in the middle of whatever it does: nothing is decided and nothing written.
func (w *world) stop() {
	w.cancel()
	<-w.done
	w.data.close()
	testingOnlyBoundary = nil
}

func (w *world) restart() { w.stop(); w.start() }

// errDead is what everything answers to an incarnation that was killed.
var errDead = errors.New("killed")

// kill ends Toad at the very place that calls it: from here on nothing of this incarnation reaches the
// disk or the host. Whoever waits for died then stops what is left of it.
func (w *world) kill() error {
	w.set(func() {
		if !w.dead {
			w.dead = true
			close(w.died)
		}
	})
	w.cancel()
	return errDead
}

func (w *world) alive() (err error) {
	w.set(func() {
		if w.dead {
			err = errDead
		}
	})
	return err
}

// killAt kills Toad before the n-th mutation of the host of that name (from now on), or after it was
// applied.
func (w *world) killAt(name string, n int, applied bool) {
	w.onMutation(func(m string) (bool, error) {
		if m == name {
			if n--; n == 0 {
				return applied, w.kill()
			}
		}
		return true, nil
	})
}

// revive waits for the kill and starts Toad again.
func (w *world) revive() {
	select {
	case <-w.died:
	case <-time.After(24 * time.Hour):
		w.t.Fatal("Toad was not killed within a day")
	}
	w.stop()
	w.onMutation(nil)
	w.start()
}

// set changes the world between two of its own steps.
func (w *world) set(change func()) {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	change()
}

func (w *world) onMutation(f func(name string) (apply bool, err error)) {
	w.set(func() { w.h.mutate = f })
}

func (w *world) enroll() (e enrolled, err error) {
	w.set(func() { e, err = w.en, w.enErr })
	return e, err
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Logf("%s %s", time.Now().Format("15:04:05.000"), strings.TrimSpace(string(b)))
	return len(b), nil
}

// ownQuadlet is what Toad may write in the Quadlet directory: a service's directory, its unit, and the unit
// before it.
var ownQuadlet = regexp.MustCompile(`^[a-z0-9-]+(/[a-z0-9_-]+\.container(\.prev)?)?$`)

// boundary checks where is written, and the invariants after every write of service.json.
func (w *world) boundary(step, path string) error {
	if err := w.alive(); err != nil {
		return err
	}
	if rel, err := filepath.Rel(w.h.quadlets, path); err == nil && !strings.HasPrefix(rel, "..") && step != "syncdir" && !ownQuadlet.MatchString(rel) {
		w.t.Errorf("%s of %s in the Quadlet directory, which is not QUADLETS/<service>/<unit>", step, rel)
	}
	// The record is in place: it is judged by what is there now, whatever comes next.
	if step == "syncdir" && path == w.data.serviceFile(w.en.Service) {
		w.judging.Lock() // read and judged in one order
		r := &record{}
		if readRecord(filepath.Join(path, "service.json"), r) == nil {
			w.invariants(r)
		}
		w.judging.Unlock()
	}
	var spoil func(step, path string) error
	w.set(func() { spoil = w.spoil })
	if spoil != nil {
		return spoil(step, path)
	}
	return nil
}

func (w *world) invariants(r *record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	bad := func(format string, a ...any) { w.t.Errorf(format, a...) }
	if err := r.check(); err != nil {
		bad("a broken record was written: %v", err)
	}
	old := w.last
	w.last = r
	if old == nil {
		return
	}
	if r.Generation < old.Generation || r.NextGeneration < old.NextGeneration {
		bad("I7: generation went from %d/%d to %d/%d", old.Generation, old.NextGeneration, r.Generation, r.NextGeneration)
	}
	o, p := r.Operation, old.Operation
	if p != nil && (o == nil || o.ID != p.ID && !p.State.terminal()) {
		bad("I3: operation %s was lost in state %s", p.ID, p.State)
	}
	if o == nil {
		return
	}
	if p != nil && p.ID == o.ID {
		if p.State.terminal() && o.State != p.State {
			bad("I3: %s ended %s and then became %s", o.ID, p.State, o.State)
		}
		for _, d := range []struct {
			name     string
			was, now *deadline
		}{{"fetch", p.FetchDeadline, o.FetchDeadline}, {"stop", p.StopDeadline, o.StopDeadline}, {"rollout", p.RolloutDeadline, o.RolloutDeadline},
			{"startup", p.StartupDeadline, o.StartupDeadline}, {"rollback", p.RollbackDeadline, o.RollbackDeadline}} {
			if d.was != nil && (d.now == nil || *d.was != *d.now) {
				bad("I9: the %s deadline moved from %v to %v", d.name, d.was, d.now)
			}
		}
		if o.Restarts.Count < p.Restarts.Count {
			bad("restarts went from %d to %d", p.Restarts.Count, o.Restarts.Count)
		}
		w.h.mu.Lock()
		ran := w.h.ran[o.ID]
		w.h.mu.Unlock()
		if o.Restarts.Count > max(0, ran-1) {
			bad("%d restarts are counted of %d starts", o.Restarts.Count, ran)
		}
	}
	if o.State == promoted && (p == nil || p.State != promoted) {
		if r.Current.Generation != o.Candidate.Generation {
			bad("promoted %d, and current is %d", o.Candidate.Generation, r.Current.Generation)
		}
		w.h.mu.Lock()
		ok := false
		for _, c := range w.h.containers {
			if c.Labels["toad.operation"] == o.ID && c.Status == "running" && time.Since(c.begun) >= c.app.readyAfter+time.Duration(w.en.Probation.StabilityWindow) {
				ok = c.app.readyAfter >= 0 && (c.app.readyFor == 0 || time.Since(c.begun) < c.app.readyAfter+c.app.readyFor)
			}
		}
		w.h.mu.Unlock()
		if !ok {
			bad("I2: promoted without a whole window of readiness of the instance that runs")
		}
	}
	if (o.State == hasFailed || o.State == rolledBack) && (r.Current != nil && r.Current.Generation == o.Candidate.Generation || r.Rollback != nil && r.Rollback.Generation == o.Candidate.Generation) {
		bad("I5: a failed candidate became current or retained")
	}
	if old.Current != nil && r.Current == nil && (r.Retired == nil || !r.Retired.Done) {
		bad("the current revision went away")
	}
	if old.Current != nil && r.Current != nil && r.Current.Generation < old.Current.Generation {
		bad("I10: current went back from %d to %d", old.Current.Generation, r.Current.Generation)
	}
}

// policed checks that every mutation of the host follows from a durable intent.
type policed struct {
	*fakeHost
	w *world
}

func (p policed) onDisk() *record {
	r := &record{}
	if err := readRecord(p.w.data.serviceFile(p.w.en.Service, "service.json"), r); err != nil {
		p.t.Errorf("I4: the host is changed without a record: %v", err)
	}
	return r
}

func (p policed) Reload(ctx context.Context) error {
	if err := p.w.alive(); err != nil {
		return err
	}
	return p.fakeHost.Reload(ctx)
}

func (p policed) ResetFailed(ctx context.Context, name string) error {
	if err := p.w.alive(); err != nil {
		return err
	}
	return p.fakeHost.ResetFailed(ctx, name)
}

func (p policed) Run(ctx context.Context, name string, argv, env []string, output string) (bool, error) {
	if err := p.w.alive(); err != nil {
		return false, err
	}
	return p.fakeHost.Run(ctx, name, argv, env, output)
}

func (p policed) Remove(ctx context.Context, id string) error {
	if err := p.w.alive(); err != nil {
		return err
	}
	return p.fakeHost.Remove(ctx, id)
}

func (p policed) Load(ctx context.Context, r io.Reader) error {
	if err := p.w.alive(); err != nil {
		return err
	}
	return p.fakeHost.Load(ctx, r)
}

func (p policed) Stop(ctx context.Context, name string) error {
	if err := p.w.alive(); err != nil {
		return err
	}
	r := p.onDisk()
	o := r.Operation
	ok := r.down() || r.Resume != nil || r.Held != nil || o != nil && (o.State == activating && o.Step != "" || o.State == rollingBack || o.State == inProbation) || r.active() == nil && r.Current != nil && !r.Installed
	if !ok {
		p.t.Errorf("I4: stop without a durable intent: state %v", o)
	}
	return p.fakeHost.Stop(ctx, name)
}

func (p policed) Start(ctx context.Context, name string) error {
	if err := p.w.alive(); err != nil {
		return err
	}
	r := p.onDisk()
	o := r.Operation
	switch {
	case r.Suspended != nil && !r.Suspended.Since.Equal(p.w.s.now()): // asked for while the start was on its way
		p.t.Error("a suspended service is started")
	case r.Retired != nil && !r.Retired.Since.Equal(p.w.s.now()):
		p.t.Error("a retired service is started")
	case r.Resume != nil && r.Resume.StartedAt != nil:
	case r.Held != nil && r.Held.StartedAt != nil:
	case o == nil:
		p.t.Error("I4: start without an operation")
	case r.active() == nil && r.Current != nil && !r.Installed:
	case o.Step != stepStart || o.State.terminal():
		p.t.Errorf("I4: start without a durable intent: state %s, step %s", o.State, o.Step)
	}
	p.w.set(func() { p.taken = 0 })
	err := p.fakeHost.Start(ctx, name)
	p.w.set(func() {
		if o == nil || o.State != rollingBack || p.taken == 0 {
			return
		}
		key := fmt.Sprint(o.ID, p.booted)
		if p.w.starts[key]++; p.w.starts[key] > 1 {
			p.t.Errorf("I11: the target of %s is started a second time", o.ID)
		}
	})
	return err
}

// submit deploys and returns the operation.
func (w *world) submit(image string) *operation {
	w.t.Helper()
	w.keys++
	op, _, err := w.s.submit(w.request(image, fmt.Sprintf("key-%d", w.keys)))
	must(w.t, err)
	return op
}

func (w *world) request(image, key string) submission {
	g := w.s.rec.Load().Generation
	return submission{kind: "deploy", image: image, key: key, hash: hashRequest(image, fmt.Sprint(g)), actor: "local", expected: g}
}

// await waits for the operation's end.
func (w *world) await(id string) *operation {
	w.t.Helper()
	return w.awaitThat(id, func(op *operation) bool { return op.State.terminal() })
}

func (w *world) awaitState(id string, st state) *operation {
	w.t.Helper()
	return w.awaitThat(id, func(op *operation) bool { return op.State == st || op.State.terminal() })
}

func (w *world) awaitThat(id string, ok func(*operation) bool) *operation {
	w.t.Helper()
	end := time.After(24 * time.Hour)
	for {
		changed := w.s.changed()
		if op := w.s.op(); op != nil && op.ID == id && ok(op) {
			return op
		}
		select {
		case <-changed:
		case <-end:
			w.t.Fatalf("operation %s is %s after a day", id, w.s.op().State)
		}
	}
}

// until waits until what is true of the record.
func (w *world) until(what string, ok func(r *record) bool) {
	w.t.Helper()
	end := time.After(24 * time.Hour)
	for {
		changed := w.s.changed()
		if ok(w.s.rec.Load()) {
			return
		}
		select {
		case <-changed:
		case <-end:
			w.t.Fatalf("not within a day: %s", what)
		}
	}
}

func (w *world) push(name string, a app) string { return w.h.push(testRepository, name, a) }

// promote deploys a good image to its end.
func (w *world) promote(name string) *operation {
	w.t.Helper()
	op := w.await(w.submit(w.push(name, app{readyAfter: 2 * time.Second})).ID)
	w.expect(op, promoted, "")
	w.until("installed", func(r *record) bool { return r.Installed })
	return op
}

func (w *world) expect(op *operation, st state, code string) {
	w.t.Helper()
	got := ""
	if op.Failure != nil {
		got = op.Failure.Code
	}
	if op.State != st || got != code {
		w.t.Fatalf("operation ended %s (%v), want %s (%s)", op.State, op.Failure, st, code)
	}
}

// expectRuns demands that exactly this image runs.
func (w *world) expectRuns(images ...string) {
	w.t.Helper()
	if got := w.h.running(w.en.Service); !slices.Equal(got, images) {
		w.t.Fatalf("running: %v, want %v", got, images)
	}
}

func (w *world) unitFile() string {
	b, err := os.ReadFile(w.s.unitPath(w.en.Unit))
	if err != nil {
		return ""
	}
	return string(b)
}

func (w *world) logCodes(id string) []string {
	lines, _ := readLog(w.data.serviceFile(w.en.Service, "operations", id+".log"))
	var codes []string
	for _, l := range lines {
		codes = append(codes, l.Code)
	}
	return codes
}

func (w *world) eventTypes() []string {
	var types []string
	b, _ := os.ReadFile(w.data.serviceFile(w.en.Service, "events.jsonl"))
	for line := range strings.Lines(string(b)) {
		_, rest, _ := strings.Cut(line, `"type":"`)
		typ, _, _ := strings.Cut(rest, `"`)
		types = append(types, typ)
	}
	return types
}

func TestFirstDeploymentIsPromotedAfterTheWindow(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		image := w.push("v1", app{readyAfter: 5 * time.Second})
		begun := time.Now()
		op := w.await(w.submit(image).ID)
		w.expect(op, promoted, "")
		if d := time.Since(begun); d < 35*time.Second || d > 38*time.Second {
			t.Errorf("promoted after %s, want the window of 30s after 5s of starting", d)
		}
		w.expectRuns(image)
		w.until("installed", func(r *record) bool { return r.Installed })
		if r := w.s.rec.Load(); r.Generation != 1 || r.Current.Image != image || r.Rollback != nil {
			t.Errorf("record %+v", r)
		}
		if !strings.Contains(w.unitFile(), "[Install]") {
			t.Error("the promoted unit does not start at boot")
		}
		want := []string{"deploy", "activate", "promote"}
		if got := w.eventTypes(); !slices.Equal(got, want) {
			t.Errorf("events %v, want %v", got, want)
		}
	})
}

func TestCandidateHasNoInstallUntilPromoted(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		op := w.submit(w.push("v1", app{}))
		w.awaitState(op.ID, inProbation)
		if strings.Contains(w.unitFile(), "[Install]") {
			t.Error("an unpromoted candidate would start at boot")
		}
		w.expect(w.await(op.ID), promoted, "")
	})
}

func TestFailedCandidateIsRolledBackToTheLastPromoted(t *testing.T) {
	for _, tt := range []struct {
		name   string
		app    app
		code   string
		within time.Duration
	}{
		{"never ready: startup deadline", app{readyAfter: -1}, "startup_deadline", 61 * time.Second},
		{"ready once, not for long enough", app{readyAfter: time.Second, readyFor: 20 * time.Second}, "rollout_deadline", 121 * time.Second},
		{"crash loop", app{exitAfter: time.Second}, "restart_budget", 10 * time.Second},
		{"crash loop as fast as can be", app{exitAfter: time.Millisecond, restartAfter: time.Millisecond, noLimit: true}, "restart_budget", 10 * time.Second},
		{"ends and is not restarted", app{exitAfter: 5 * time.Second, noRestart: true}, "unit_failed", 10 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.promote("v1")
				second := w.promote("v2")
				begun := time.Now()
				op := w.await(w.submit(w.push("bad", tt.app)).ID)
				w.expect(op, rolledBack, tt.code)
				if d := time.Since(begun); d > tt.within+10*time.Second {
					t.Errorf("ended after %s, want %s and the rollback", d, tt.within)
				}
				w.expectRuns(second.Candidate.Image)
				if r := w.s.rec.Load(); r.Generation != 2 || r.NextGeneration != 4 || r.Rollback.Generation != 1 {
					t.Errorf("generation %d, next %d, retained %d", r.Generation, r.NextGeneration, r.Rollback.Generation)
				}
				if !strings.Contains(w.unitFile(), "[Install]") || !strings.Contains(w.unitFile(), second.Candidate.Image) {
					t.Error("the unit is not the second revision's")
				}
				w.expect(w.await(w.submit(w.push("v4", app{})).ID), promoted, "") // S6
			})
		})
	}
}

func TestReadyThenRestartBeginsTheWindowAgain(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		begun := time.Now()
		op := w.await(w.submit(w.push("v1", app{readyAfter: time.Second, exitAfter: 20 * time.Second, exitOnce: true})).ID)
		w.expect(op, promoted, "")
		if d := time.Since(begun); d < 51*time.Second {
			t.Errorf("promoted after %s: the window did not begin again", d)
		}
		if op.Restarts.Count != 1 {
			t.Errorf("%d restarts, want 1", op.Restarts.Count)
		}
		if codes := w.logCodes(op.ID); !slices.Contains(codes, "window_reset") || !slices.Contains(codes, "restart") {
			t.Errorf("log %v", codes)
		}
	})
}

func TestRestartByHandCounts(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		op := w.submit(w.push("v1", app{}))
		w.awaitThat(op.ID, func(op *operation) bool { return op.FirstReady != nil })
		for range 2 {
			w.h.restartByHand("hello.service")
			time.Sleep(1500 * time.Millisecond)
		}
		op = w.await(op.ID)
		w.expect(op, hasFailed, "no_rollback_target")
		if op.Failure.Cause != "restart_budget" || op.Restarts.Count != 2 {
			t.Errorf("cause %s, %d restarts", op.Failure.Cause, op.Restarts.Count)
		}
	})
}

// A crash loop with a period of 100 ms against looks every second.
func TestFastCrashLoopIsCountedRight(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.set(func() { w.en.Probation.RestartBudget = 7 })
		begun := time.Now()
		op := w.await(w.submit(w.push("bad", app{exitAfter: 50 * time.Millisecond, restartAfter: 50 * time.Millisecond, noLimit: true})).ID)
		if op.Restarts.Count != 8 || op.Failure.Cause != "restart_budget" {
			t.Errorf("%d restarts, %v; want 8", op.Restarts.Count, op.Failure)
		}
		// Eight periods of 400 ms, one observation interval at the most, the stop.
		if d := time.Since(begun); d > 6*time.Second {
			t.Errorf("ended after %s", d)
		}
	})
}

func TestNoPreviousRevision(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		op := w.await(w.submit(w.push("bad", app{readyAfter: -1})).ID)
		w.expect(op, hasFailed, "no_rollback_target")
		if op.Failure.Cause != "startup_deadline" {
			t.Errorf("cause %s", op.Failure.Cause)
		}
		w.expectRuns()
		if w.unitFile() != "" {
			t.Error("the candidate's unit is still there")
		}
		w.h.reboot()
		w.expectRuns()
		w.expect(w.await(w.submit(w.push("v1", app{})).ID), promoted, "")
	})
}

func TestFailedRollbackIsTerminal(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		w.set(func() {
			w.h.apps[first.Candidate.digest()].readyAfter = -1 // it does not come back (G7)
		})
		op := w.await(w.submit(w.push("bad", app{exitAfter: time.Second})).ID)
		w.expect(op, hasFailed, "rollback_failed")
		if op.Failure.Cause != "restart_budget" {
			t.Errorf("cause %s", op.Failure.Cause)
		}
		starts := len(w.starts)
		w.restart()
		time.Sleep(time.Hour)
		if w.s.op().ID != op.ID || len(w.starts) != starts {
			t.Error("something was tried again")
		}
		w.expectRuns(first.Candidate.Image) // left to systemd
	})
}

// The target cannot be put in place, so the rollback fails. The unit on the host is the current revision's
// again, for a boot, and nothing is started by Toad.
func TestFailedRollbackLeavesTheCurrentUnit(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		op := w.submit(w.push("bad", app{exitAfter: time.Second}))
		w.awaitState(op.ID, inProbation)
		w.set(func() {
			maps.DeleteFunc(w.h.images, func(ref, _ string) bool { return ref == first.Candidate.Image })
			w.h.mutate = func(name string) (bool, error) {
				if name == "load image" {
					return false, errors.New("no space left on device")
				}
				return true, nil
			}
		})
		op = w.await(op.ID)
		w.expect(op, hasFailed, "rollback_failed")
		starts := len(w.starts)
		w.until("installed", func(r *record) bool { return r.Installed })
		unit, err := os.ReadFile(w.s.unitPath("hello.container"))
		must(t, err)
		if !strings.Contains(string(unit), "Image="+first.Candidate.Image) || !strings.Contains(string(unit), "[Install]") {
			t.Errorf("the unit in place:\n%s", unit)
		}
		w.restart()
		time.Sleep(time.Hour)
		if len(w.starts) != starts {
			t.Error("something was tried again")
		}
		w.expectRuns()
		w.stop()
		w.set(func() { w.h.mutate = nil; w.h.images[first.Candidate.Image] = first.Candidate.ConfigID })
		w.h.reboot()
		w.start()
		time.Sleep(time.Minute)
		w.expectRuns(first.Candidate.Image)
	})
}

// What was counted of the current revision is not forgotten by a rollback to it.
func TestRestartsAreCountedOverARollback(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		w.h.kill("hello.service")
		w.until("counted", func(r *record) bool { return r.Watch.Count == 1 })
		w.expect(w.await(w.submit(w.push("bad", app{exitAfter: time.Second})).ID), rolledBack, "restart_budget")
		time.Sleep(time.Minute)
		if n := w.s.rec.Load().Watch.Count; n != 1 {
			t.Errorf("%d restarts since the promotion", n)
		}
	})
}

func TestRequestsThatRace(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		refused := func(req submission, code string) {
			t.Helper()
			_, _, err := w.s.submit(req)
			var e *apiError
			if !errors.As(err, &e) || e.Code != code {
				t.Errorf("got %v, want %s", err, code)
			}
		}
		image := w.push("v1", app{})
		req := w.request(image, "k")
		op, existing, err := w.s.submit(req)
		must(t, err)
		if existing {
			t.Error("the first request is no repetition")
		}
		again, existing, err := w.s.submit(req)
		must(t, err)
		if !existing || again.ID != op.ID {
			t.Error("a repeated key made another operation")
		}
		other := req
		other.hash = hashRequest("something else")
		refused(other, "key_reused")
		refused(w.request(image, "k2"), "rollout_active")
		w.expect(w.await(op.ID), promoted, "")
		stale := req
		stale.key = "k3"
		refused(stale, "stale_generation")
		again, existing, err = w.s.submit(req)
		must(t, err)
		if !existing || again.ID != op.ID || again.State != promoted {
			t.Error("the key does not name its ended operation")
		}
		// Redeploying the same digest: a new generation, and the old expectation is stale (G9).
		w.expect(w.await(w.submit(image).ID), promoted, "")
		if g := w.s.rec.Load().Generation; g != 2 {
			t.Errorf("generation %d, want 2", g)
		}
		again, existing, err = w.s.submit(req)
		must(t, err)
		if !existing || again.ID != op.ID {
			t.Error("an archived key is forgotten")
		}
		wrong := w.request("registry.example.org/apps/other@sha256:"+strings.Repeat("0", 64), "k4")
		refused(wrong, "repository_not_allowed")
		w.set(func() { w.enErr = errors.New("broken") })
		refused(w.request(image, "k5"), "enrollment_invalid")
	})
}

func TestRollbackRequestInEachState(t *testing.T) {
	for _, tt := range []struct {
		at    state
		state state
	}{{preparing, hasFailed}, {activating, rolledBack}, {inProbation, rolledBack}} {
		t.Run(string(tt.at), func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				first := w.promote("v1")
				op := w.submit(w.push("v2", app{}))
				w.awaitThat(op.ID, func(op *operation) bool { // in activating: once the stop is meant
					return op.State == tt.at && (tt.at != activating || op.Step != "") || op.State.terminal()
				})
				_, again, err := w.s.requestRollback(op.ID, "local")
				must(t, err)
				if again {
					t.Error("the first request is no repetition")
				}
				if tt.at == inProbation {
					if _, again, err = w.s.requestRollback(op.ID, "local"); err != nil || !again {
						t.Errorf("a second request: %v %v", again, err)
					}
				}
				op = w.await(op.ID)
				w.expect(op, tt.state, "requested")
				w.expectRuns(first.Candidate.Image)
				if _, _, err = w.s.requestRollback(op.ID, "local"); err == nil {
					t.Error("an ended operation takes a request")
				}
			})
		})
	}
}

func TestRollbackAfterPromotionIsAnOrdinaryDeployment(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		w.promote("v2")
		w.set(func() { w.h.registryDown = true })
		req := submission{kind: "rollback", key: "r", hash: "h", actor: "local", expected: 2}
		op, _, err := w.s.submit(req)
		must(t, err)
		op = w.await(op.ID)
		w.expect(op, promoted, "")
		if op.Candidate.Generation != 3 || op.Candidate.Image != first.Candidate.Image {
			t.Errorf("candidate %+v", op.Candidate)
		}
		w.expectRuns(first.Candidate.Image)
		req.key, req.expected = "r2", 3
		var e *apiError
		if _, _, err := w.s.submit(req); !errors.As(err, &e) || e.Code != "not_rollbackable" {
			t.Errorf("rolling back a rollback: %v", err)
		}
	})
}

func TestUnkillableOldInstance(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		image := w.push("stuck", app{unkillable: true})
		w.expect(w.await(w.submit(image).ID), promoted, "")
		op := w.await(w.submit(w.push("v2", app{})).ID)
		w.expect(op, hasFailed, "termination_unconfirmed")
		r := w.s.rec.Load()
		if r.Held == nil || len(r.Held.Remains) == 0 {
			t.Fatalf("held %+v", r.Held)
		}
		var e *apiError
		if _, _, err := w.s.submit(w.request(image, "held")); !errors.As(err, &e) || e.Code != "held" {
			t.Errorf("a held service takes a deployment: %v", err)
		}
		w.restart() // held over a restart of Toad
		time.Sleep(10 * time.Minute)
		if w.s.rec.Load().Held == nil {
			t.Fatal("released while a process lives")
		}
		w.h.reap("hello.service")
		w.until("released", func(r *record) bool { return r.Held == nil })
		time.Sleep(2 * time.Second)
		w.expectRuns(image) // the current revision came back by itself
		w.set(func() {
			w.h.apps[digestOf(image)].unkillable = false
		})
		w.expect(w.await(w.submit(w.push("v3", app{})).ID), promoted, "")
	})
}

func TestUnkillableCandidate(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		op := w.await(w.submit(w.push("stuck", app{unkillable: true, readyAfter: -1})).ID)
		w.expect(op, hasFailed, "rollback_failed")
		if op.Failure.Cause != "startup_deadline" || w.s.rec.Load().Held == nil {
			t.Errorf("failure %+v, held %v", op.Failure, w.s.rec.Load().Held)
		}
		w.h.reap("hello.service")
		w.until("released", func(r *record) bool { return r.Held == nil })
		time.Sleep(time.Minute)
		w.expectRuns()
		if !strings.Contains(w.unitFile(), first.Candidate.Image) {
			t.Error("the unit is not the target's")
		}
		w.expect(w.await(w.submit(w.push("v3", app{})).ID), promoted, "")
	})
}

func TestIgnoresSIGTERMIsConfirmedDead(t *testing.T) { // S1
	inWorld(t, func(t *testing.T, w *world) {
		image := w.push("stubborn", app{ignoresTerm: true})
		w.expect(w.await(w.submit(image).ID), promoted, "")
		w.expect(w.await(w.submit(w.push("v2", app{})).ID), promoted, "")
	})
}

func TestForeignContainer(t *testing.T) { // S3
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		foreign := &hostContainer{app: &app{}, container: container{ID: strings.Repeat("f", 64), Name: "hello2", Status: "exited", Labels: map[string]string{"toad.service": "hello"}}}
		w.set(func() {
			w.h.containers[foreign.ID] = foreign
		})
		op := w.await(w.submit(w.push("v2", app{})).ID)
		w.expect(op, hasFailed, "foreign_container")
		if !strings.Contains(op.Failure.Summary, "hello2") || w.s.rec.Load().Held != nil {
			t.Errorf("failure %+v", op.Failure)
		}
		w.set(func() {
			delete(w.h.containers, foreign.ID)
		})
		w.expectRuns(first.Candidate.Image)

		// One that appears after the stop: nothing is started, and it is not touched.
		w.onMutation(func(name string) (bool, error) {
			if name == "stop hello.service" {
				w.set(func() {
					w.h.containers[foreign.ID] = foreign
				})
			}
			return true, nil
		})
		op = w.await(w.submit(w.push("v3", app{})).ID)
		w.expect(op, hasFailed, "termination_unconfirmed")
		w.set(func() { w.h.mutate = nil })
		if _, err := w.h.Container(context.Background(), foreign.ID); err != nil {
			t.Error("the foreign container was removed")
		}
		w.set(func() {
			delete(w.h.containers, foreign.ID)
		})
		w.until("released", func(r *record) bool { return r.Held == nil })
		time.Sleep(2 * time.Second)
		w.expectRuns(first.Candidate.Image)
	})
}

// An answer counts only if the same instance is there before and after it, and is the revision's own.
func TestWhoAnswers(t *testing.T) { // R10
	of := func(w *world) *hostContainer { return w.h.unit("hello.service").container }
	for name, tt := range map[string]struct {
		change func(w *world)
		after  bool // while it answers; else before the first look
		want   string
	}{
		"itself": {func(*world) {}, true, ""},
		// The same image under another digest beside it (G5) is told by the reference, another one by its id.
		"another image":      {func(w *world) { of(w).ImageID = "sha256:" + strings.Repeat("0", 64) }, false, "the container runs another image than the verified one"},
		"another reference":  {func(w *world) { of(w).ImageName = testRepository + "@sha256:" + strings.Repeat("0", 64) }, false, "the container runs another image reference"},
		"another operation":  {func(w *world) { of(w).Labels["toad.operation"] = "x" }, false, "the container does not carry the labels of this revision"},
		"another generation": {func(w *world) { of(w).Labels["toad.generation"] = "7" }, false, "the container does not carry the labels of this revision"},
		"not the unit's":     {func(w *world) { of(w).ConmonPID++ }, false, "the container of that name is not run by the unit"},
		"paused":             {func(w *world) { of(w).Status = "paused" }, false, "the container is paused"},
		"no address":         {func(w *world) { of(w).Addresses = nil }, false, "the container has no address on the enrolled network"},
		"gone":               {func(w *world) { delete(w.h.containers, of(w).ID) }, false, "there is no container"},
		"gone meanwhile":     {func(w *world) { delete(w.h.containers, of(w).ID) }, true, "it changed while it answered: there is no container"},
		"another invocation": {func(w *world) { w.h.unit("hello.service").invocation = strings.Repeat("a", 32) }, true, "it was replaced or restarted while it answered"},
		"started anew":       {func(w *world) { of(w).StartedAt = of(w).StartedAt.Add(time.Second) }, true, "it was replaced or restarted while it answered"},
		"moved":              {func(w *world) { of(w).Addresses["systemd-apps"] = "10.89.0.251" }, true, "it was replaced or restarted while it answered"},
		"replaced by its twin": {func(w *world) {
			c := *of(w)
			delete(w.h.containers, c.ID)
			c.ID = strings.Repeat("e", 64)
			w.h.containers[c.ID] = &c
		}, true, "it was replaced or restarted while it answered"},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.promote("v1")
				cur := w.s.rec.Load().Current
				rev, err := w.data.revision("hello", cur.Generation)
				must(t, err)
				w.stop() // only this observation looks
				if !tt.after {
					w.set(func() { tt.change(w) })
				}
				asked := false
				o, err := observe(context.Background(), w.h, w.h, func(context.Context, target) error {
					asked = true
					if tt.after {
						w.set(func() { tt.change(w) })
					}
					return nil // whoever it was, it says 200
				}, rev, cur.reference)
				must(t, err)
				if o.reason != tt.want || o.ready() != (tt.want == "") || asked != (tt.after) {
					t.Errorf("%q, ready %v, asked %v; want %q", o.reason, o.ready(), asked, tt.want)
				}
				w.h.mu.Lock()
				w.h.containers = map[string]*hostContainer{}
				w.h.mu.Unlock()
				w.start()
			})
		})
	}
}

func TestUnitNotOwned(t *testing.T) {
	for name, text := range map[string]string{
		"no marker":        "[Container]\nImage=x@sha256:1\n",
		"another Toad's":   "# toad data=aaaa service=hello generation=1 operation=" + strings.Repeat("0", 26) + "\n[Container]\nImage=x@sha256:1\n",
		"unknown revision": "# toad data=ID service=hello generation=7 operation=" + strings.Repeat("0", 26) + "\n[Container]\nImage=x@sha256:1\n",
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				text := strings.ReplaceAll(text, "ID", w.data.id)
				must(t, os.MkdirAll(filepath.Dir(w.s.unitPath(w.en.Unit)), 0o700))
				must(t, os.WriteFile(w.s.unitPath(w.en.Unit), []byte(text), 0o600))
				w.expect(w.await(w.submit(w.push("v1", app{})).ID), hasFailed, "unit_not_owned")
				if w.unitFile() != text || len(w.h.mutations) > 0 {
					t.Errorf("something was touched: %v", w.h.mutations)
				}
			})
		})
	}
}

// The service's directory leads to where infrastructure keeps units of its own: nothing is written there.
func TestUnitDirectoryThatLeadsElsewhere(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		infra := filepath.Join(w.h.quadlets, "_infra", "toad")
		must(t, os.MkdirAll(infra, 0o700))
		must(t, os.Symlink(infra, filepath.Dir(w.s.unitPath(w.en.Unit))))
		w.expect(w.await(w.submit(w.push("v1", app{})).ID), hasFailed, "unit_not_owned")
		files, err := os.ReadDir(infra)
		must(t, err)
		if len(files) > 0 || len(w.h.mutations) > 0 {
			t.Errorf("something was touched: %v, %v", files, w.h.mutations)
		}
	})
}

func TestRefusedBeforeAnythingStops(t *testing.T) { // E4, S5
	for name, tt := range map[string]struct {
		spoil func(w *world)
		code  string
	}{
		"generator refuses": {func(w *world) { w.h.generator = func(string, []byte) bool { return false } }, "unit_invalid"},
		"systemd refuses":   {func(w *world) { w.h.analyze = false }, "unit_invalid"},
		"podman refuses":    {func(w *world) { w.h.badFlags = true }, "unit_invalid"},
		"registry down":     {func(w *world) { w.h.registryDown = true }, "fetch_failed"},
		"enrollment gone":   {func(w *world) { w.enErr = errors.New("gone") }, "stale_enrollment"},
		"garbage beside it": {func(w *world) { // E13
			must(w.t, os.WriteFile(filepath.Join(filepath.Dir(w.s.unitPath(w.en.Unit)), "zz.volume"), []byte("garbage"), 0o600))
		}, "unit_invalid"},
		"something starts it": {func(w *world) { w.h.unit("hello.service").dependents = []string{"other.service", "default.target"} }, "unit_invalid"},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				first := w.promote("v1")
				w.set(func() { w.h.mutations = nil })
				req := w.request(w.push("v2", app{}), "k")
				op, _, err := w.s.submit(req)
				must(t, err)
				w.set(func() { tt.spoil(w) })
				w.expect(w.await(op.ID), hasFailed, tt.code)
				w.expectRuns(first.Candidate.Image)
				if slices.Contains(w.h.mutations, "stop hello.service") || !strings.Contains(w.unitFile(), first.Candidate.Image) {
					t.Errorf("the running instance was touched: %v", w.h.mutations)
				}
			})
		})
	}
}

// The enrollment changes after the acceptance and before the rollout begins.
func TestEnrollmentChangedBeforeTheRollout(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		asked := 0
		w.s.enroll = func() (enrolled, error) {
			e := w.en
			if asked++; asked > 1 {
				e.Hash = "h2"
			}
			return e, nil
		}
		w.expect(w.await(w.submit(w.push("v2", app{})).ID), hasFailed, "stale_enrollment")
		w.expectRuns(first.Candidate.Image)
	})
}

func TestBrokenQuadletOfOthersDoesNoHarm(t *testing.T) { // E13
	inWorld(t, func(t *testing.T, w *world) {
		must(t, os.WriteFile(filepath.Join(w.h.quadlets, "other.container"), []byte("garbage"), 0o600))
		w.expect(w.await(w.submit(w.push("v1", app{})).ID), promoted, "")
	})
}

func TestRedeployNeedsNoRegistry(t *testing.T) { // G6
	inWorld(t, func(t *testing.T, w *world) {
		op := w.promote("v1")
		w.set(func() { w.h.registryDown = true })
		w.h.prune()
		w.expect(w.await(w.submit(op.Candidate.Image).ID), promoted, "")
	})
}

// At every mutation of a rollout somebody prunes everything that is not in use (G1, G2).
func TestPruneAtEveryStep(t *testing.T) {
	for name, remove := range map[string]func(w *world){
		"prune":       func(w *world) { w.h.prune() },
		"rmi --force": func(w *world) { w.set(func() { clear(w.h.images) }) }, // in use or not
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.promote("v0")
				first := w.promote("v1")
				bad := w.push("bad", app{readyAfter: -1})
				w.onMutation(func(string) (bool, error) { remove(w); return true, nil })
				op := w.submit(bad)
				w.awaitState(op.ID, activating)
				w.set(func() { w.h.registryDown = true })
				w.expect(w.await(op.ID), rolledBack, "startup_deadline")
				w.expectRuns(first.Candidate.Image)
			})
		})
	}
}

// Toad is killed and started again every few seconds of a rollout: deadlines and counts go on.
func TestKilledAgainAndAgain(t *testing.T) {
	for _, tt := range []struct {
		name  string
		app   app
		state state
		code  string
	}{
		{"good", app{readyAfter: time.Second}, promoted, ""},
		{"never ready", app{readyAfter: -1}, rolledBack, "startup_deadline"},
		{"crash loop", app{exitAfter: 8 * time.Second, readyAfter: time.Second}, rolledBack, "restart_budget"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.promote("v1")
				op := w.submit(w.push("v2", tt.app))
				for i := range 40 {
					time.Sleep(time.Duration(i*37%700) * time.Millisecond)
					w.restart()
				}
				w.expect(w.await(op.ID), tt.state, tt.code)
			})
		})
	}
}

// Killed one second before the deadline and started again after it: it ends at once (R3).
func TestDeadlinePassesWhileToadIsDown(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		op := w.submit(w.push("v2", app{readyAfter: -1}))
		w.awaitState(op.ID, inProbation)
		time.Sleep(55 * time.Second)
		w.stop()
		time.Sleep(time.Hour)
		w.start()
		begun := time.Now()
		w.expect(w.await(op.ID), rolledBack, "startup_deadline")
		if d := time.Since(begun); d > 5*time.Second {
			t.Errorf("ended %s after the start", d)
		}
		w.expectRuns(first.Candidate.Image)
	})
}

func TestRestartsWhileToadIsDown(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		op := w.submit(w.push("v2", app{readyAfter: time.Second}))
		w.awaitThat(op.ID, func(op *operation) bool { return op.FirstReady != nil })
		w.stop()
		for range 3 { // by hand: systemd's counter begins anew each time
			w.h.restartByHand("hello.service")
			time.Sleep(2 * time.Second)
		}
		w.start()
		op = w.await(op.ID)
		w.expect(op, rolledBack, "restart_budget")
		if op.Restarts.Count != 3 {
			t.Errorf("%d restarts, want 3", op.Restarts.Count)
		}
	})
}

func TestRebootDuringProbation(t *testing.T) {
	for _, tt := range []struct {
		name   string
		after  time.Duration // into probation
		unseen time.Duration // then Toad is away, the host is not
		down   time.Duration
		state  state
		code   string
	}{
		{"in time", 10 * time.Second, 0, 5 * time.Second, promoted, ""},
		{"too late for a window", 10 * time.Second, 0, 85 * time.Second, rolledBack, "rollout_deadline"},
		{"past the deadline", 10 * time.Second, 0, time.Hour, rolledBack, "rollout_deadline"},
		// Podman keeps the record of a container whose id Toad never saw.
		{"its container unseen, in time", 0, time.Second, 5 * time.Second, promoted, ""},
		{"its container unseen, past the deadline", 0, time.Second, time.Hour, rolledBack, "startup_deadline"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				first := w.promote("v1")
				image := w.push("v2", app{readyAfter: time.Second})
				op := w.submit(image)
				w.awaitState(op.ID, inProbation)
				time.Sleep(tt.after)
				w.stop()
				time.Sleep(tt.unseen)
				w.h.reboot()
				time.Sleep(tt.down)
				w.expectRuns() // nothing of the candidate before Toad has reconciled
				w.start()
				w.expect(w.await(op.ID), tt.state, tt.code)
				if tt.state == promoted {
					w.expectRuns(image)
				} else {
					w.expectRuns(first.Candidate.Image)
				}
			})
		})
	}
}

// Over a reboot the wall clock decides; one that went back is a passed deadline.
func TestWallClockWentBackOverAReboot(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		op := w.submit(w.push("v2", app{}))
		w.awaitState(op.ID, inProbation)
		w.stop()
		w.h.reboot()
		w.set(func() { w.h.kernelBoot, w.h.wallOffset = "boot-2", -24*time.Hour })
		w.start()
		w.expect(w.await(op.ID), rolledBack, "startup_deadline")
	})
}

// Within one boot a step of the wall clock moves nothing.
func TestWallClockStepsMoveNothing(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		op := w.submit(w.push("v1", app{}))
		w.awaitState(op.ID, inProbation)
		w.set(func() {
			w.h.wallOffset = 48 * time.Hour
		})
		w.restart()
		w.expect(w.await(op.ID), promoted, "")
	})
}

func TestPromotedComesBackAtBootWithoutToad(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		op := w.promote("v1")
		w.stop()
		w.h.reboot()
		time.Sleep(time.Minute)
		w.expectRuns(op.Candidate.Image)
		w.start()
	})
}

// Killed between the promotion and what follows from it, and the host booted: it stays promoted, and
// is started by Toad because nothing else would (G10).
func TestKilledAfterThePromotion(t *testing.T) {
	for _, boot := range []bool{false, true} {
		t.Run(fmt.Sprintf("boot=%v", boot), func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				image := w.push("v1", app{})
				op := w.submit(image)
				stopped := make(chan struct{})
				w.set(func() {
					w.spoil = func(step, path string) error {
						w.mu.Lock()
						defer w.mu.Unlock()
						if w.last != nil && w.last.Operation.State == promoted && step == "append" {
							select {
							case <-stopped:
							default:
								close(stopped)
							}
							return errors.New("killed")
						}
						return nil
					}
				})
				<-stopped
				w.stop()
				w.set(func() { w.spoil = nil })
				if boot {
					w.h.reboot()
				}
				w.start()
				w.until("installed", func(r *record) bool { return r.Installed })
				w.expect(w.s.op(), promoted, "")
				time.Sleep(time.Second)
				w.expectRuns(image)
				if got := w.eventTypes(); !slices.Equal(got, []string{"deploy", "activate", "promote"}) {
					t.Errorf("events %v", got)
				}
				w.promote("v2")
				_ = op
			})
		})
	}
}

func TestPodmanHangsDuringTheStop(t *testing.T) { // S4
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		w.onMutation(func(name string) (bool, error) {
			if name == "stop hello.service" {
				w.set(func() {
					w.h.podmanHangs = true
				})
			}
			return true, nil
		})
		op := w.await(w.submit(w.push("v2", app{})).ID)
		w.expect(op, hasFailed, "termination_unconfirmed")
		if r := w.s.rec.Load(); !slices.Contains(r.Held.Remains, "Podman does not answer") {
			t.Errorf("held %+v", r.Held)
		}
		w.set(func() { w.h.mutate = nil })
		w.set(func() {
			w.h.podmanHangs = false
		})
		w.until("released", func(r *record) bool { return r.Held == nil })
		time.Sleep(2 * time.Second)
		w.expectRuns(first.Candidate.Image)
	})
}

func TestManagerHangs(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		w.set(func() {
			w.h.managerHangs = true
		})
		w.set(func() { w.en.FetchDeadline = duration(time.Minute) })
		op := w.submit(w.push("v2", app{}))
		w.expect(w.await(op.ID), hasFailed, "interrupted")
		w.set(func() {
			w.h.managerHangs = false
		})
		w.expectRuns(first.Candidate.Image)
		w.expect(w.await(w.submit(w.push("v3", app{})).ID), promoted, "")
	})
}

// A gap in which nobody could look does not count as ready time.
func TestGapDoesNotAccumulate(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		begun := time.Now()
		op := w.submit(w.push("v1", app{}))
		w.awaitThat(op.ID, func(op *operation) bool { return op.FirstReady != nil })
		time.Sleep(10 * time.Second)
		w.set(func() {
			w.h.podmanHangs = true
		})
		time.Sleep(15 * time.Second)
		w.set(func() {
			w.h.podmanHangs = false
		})
		w.expect(w.await(op.ID), promoted, "")
		if d := time.Since(begun); d < 55*time.Second {
			t.Errorf("promoted after %s", d)
		}
	})
}

func TestAfterPromotionFailuresAreToldAndNothingElse(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		op := w.promote("v1")
		w.promote("v2")
		w.h.kill("hello.service")
		w.until("restart counted", func(r *record) bool { return r.Watch.Count == 1 })
		var a *app
		w.set(func() {
			a = w.h.apps[w.s.rec.Load().Current.digest()]
			a.readyAfter = -1
		})
		time.Sleep(2 * time.Minute)
		w.set(func() {
			a.readyAfter = 0
		})
		time.Sleep(time.Minute)
		types := w.eventTypes()
		for _, typ := range []string{"restart", "unhealthy", "healthy"} {
			if !slices.Contains(types, typ) {
				t.Errorf("no event %s in %v", typ, types)
			}
		}
		if r := w.s.rec.Load(); r.Generation != 2 || r.Operation.State != promoted || slices.Contains(types, "rollback") {
			t.Errorf("a failure after promotion changed the outcome: %+v", r)
		}
		_ = op
	})
}

func TestImageRemovedAfterPromotionIsLoadedBack(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		op := w.promote("v1")
		w.set(func() {
			clear(w.h.images) // podman rmi --force
		})
		w.set(func() { w.h.registryDown = true })
		w.h.kill("hello.service")
		time.Sleep(2 * time.Minute)
		var ok bool
		w.set(func() { _, ok = w.h.images[op.Candidate.Image] })
		if !ok {
			t.Error("the image was not loaded back")
		}
		if !slices.Contains(w.eventTypes(), "retention-restored") {
			t.Errorf("events %v", w.eventTypes())
		}
	})
}

func TestRetentionProblemsAreSaidBeforeTheyMatter(t *testing.T) { // G3, G8
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		w.promote("v2")
		ready := func() bool { v := w.s.view(true); return v.Rollback.Ready }
		time.Sleep(retentionInterval)
		if !ready() {
			t.Fatalf("problems %+v", w.s.view(true).Rollback.Problems)
		}
		blob := filepath.Join(w.s.images(), "blobs", "sha256", strings.TrimPrefix(first.Candidate.ConfigID, "sha256:"))
		w.set(func() { w.h.registryDown = true }) // first: a look in between would fetch it again
		must(t, os.WriteFile(blob, []byte("damaged"), 0o600))
		time.Sleep(2 * retentionInterval)
		v := w.s.view(true)
		if v.Rollback.Ready || len(v.Rollback.Problems) != 1 || v.Rollback.Problems[0].Code != "image_damaged" {
			t.Fatalf("ready %v, problems %+v", v.Rollback.Ready, v.Rollback.Problems)
		}
		w.set(func() { w.h.registryDown = false })
		time.Sleep(2 * retentionInterval)
		if !ready() {
			t.Errorf("not repaired: %+v", w.s.view(true).Rollback.Problems)
		}
		types := w.eventTypes()
		if !slices.Contains(types, "retention-lost") || !slices.Contains(types, "retention-restored") {
			t.Errorf("events %v", types)
		}
	})
}

// Two services at once: one that hangs does not hold up the other.
func TestServicesDoNotDelayEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFakeHost(t)
		a := newWorldOn(t, h, "hello")
		b := &service{}
		host := h.host()
		en := testEnrollment("other")
		slow := *host
		slow.fetch = func(ctx context.Context, dir, image string, limit byteSize) (imageInfo, error) {
			<-ctx.Done()
			return imageInfo{}, failed("fetch_failed", ctx.Err(), digestOf(image), "no answer")
		}
		b = newService("other", a.data, &slow, func() (enrolled, error) { return en, nil }, slog.New(slog.NewTextHandler(io.Discard, nil)))
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); b.run(ctx) }()
		synctest.Wait()
		_, _, err := b.submit(submission{kind: "deploy", image: testRepository + "@sha256:" + strings.Repeat("0", 64), key: "k", hash: "h", actor: "local"})
		must(t, err)
		begun := time.Now()
		a.expect(a.await(a.submit(a.push("v1", app{})).ID), promoted, "")
		if d := time.Since(begun); d > 33*time.Second {
			t.Errorf("took %s beside a hung registry", d)
		}
		if b.op().State != preparing {
			t.Errorf("the other is %s", b.op().State)
		}
		cancel()
		<-done
		a.stop()
	})
}
