package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// findings collects what a run in a bubble finds, so that whoever began it can shrink or go on.
type findings struct {
	testing.TB
	mu   sync.Mutex
	list []string
	log  []string
}

type stopRun struct{}

func (f *findings) Helper() {}

func (f *findings) Logf(format string, a ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if text := fmt.Sprintf(format, a...); !strings.Contains(text, "processes of the unit are still there") {
		f.log = append(f.log, text)
	}
}

func (f *findings) Errorf(format string, a ...any) {
	f.Logf("FAILS: "+format, a...)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = append(f.list, fmt.Sprintf(format, a...))
}
func (f *findings) Error(a ...any)                 { f.Errorf("%s", fmt.Sprint(a...)) }
func (f *findings) Fatalf(format string, a ...any) { f.Errorf(format, a...); panic(stopRun{}) }
func (f *findings) Fatal(a ...any)                 { f.Fatalf("%s", fmt.Sprint(a...)) }

// explore runs one world in a bubble of its own and returns what it found.
func explore(t *testing.T, run func(w *world)) *findings {
	f := &findings{}
	synctest.Test(t, func(t *testing.T) {
		f.TB = t
		w := newWorld(f)
		w.up = true
		defer func() {
			if p := recover(); p != nil && p != (stopRun{}) {
				buf := make([]byte, 16<<10)
				f.Errorf("panic: %v\n%s", p, buf[:runtime.Stack(buf, false)])
			}
			w.disarm()
			w.down()
		}()
		run(w)
	})
	return f
}

// The ways in which a boundary may be met.
const (
	notApplied   = "killed before it"
	notHeard     = "killed after it"
	errorApplied = "an error, though applied"
)

// arm makes the n-th boundary from now on, of a durable step or a mutation of the host, the place of
// that. pick says which boundary is meant; nil means every one.
func (w *world) arm(n int, variant string, pick func(name string) bool) {
	w.set(func() { w.countdown, w.variant, w.pick = n, variant, pick })
	w.onMutation(func(name string) (bool, error) {
		switch w.cross(w.place("host", name)) {
		case notApplied:
			return false, w.kill()
		case notHeard:
			return true, w.kill()
		case errorApplied:
			return true, errors.New(canary + ": an error, though applied")
		}
		return true, nil
	})
	w.set(func() {
		w.spoil = func(step, path string) error {
			switch w.cross(w.place(step, path)) {
			case notApplied:
				return w.kill()
			case notHeard: // that is before the next one
				w.set(func() { w.countdown, w.variant, w.pick = 1, notApplied, nil })
			case errorApplied: // for a replacement this is its directory's sync
				return errors.New(canary + ": input/output error")
			}
			return nil
		}
	})
}

func (w *world) disarm() {
	w.set(func() { w.countdown, w.spoil, w.h.mutate, w.seen = 0, nil, nil, nil })
}

// cross counts a boundary and says what happens at it.
func (w *world) cross(name string) (variant string) {
	w.set(func() {
		if w.seen != nil {
			w.seen(name)
		}
		if w.countdown > 0 && (w.pick == nil || w.pick(name)) {
			if w.countdown--; w.countdown == 0 {
				variant = w.variant
			}
		}
	})
	if variant != "" {
		w.t.Logf("%s: %s", variant, name)
	}
	return variant
}

// place names a boundary stably: the state, the step and what it concerns.
func (w *world) place(step, path string) string {
	st := "idle"
	if r := w.s.rec.Load(); r != nil && r.active() != nil {
		st = string(r.Operation.State)
		if r.Operation.Step != "" {
			st += "." + r.Operation.Step
		}
	} else if r != nil && r.duty() != watching {
		st = string(r.duty())
		if r.duty() == holding {
			st = "held"
		}
	}
	what := path
	if step != "host" {
		what = filepath.Base(path)
		dir := filepath.Base(filepath.Dir(path))
		switch {
		case strings.HasPrefix(path, w.h.quadlets):
			what = "quadlets/" + what
		case dir == "operations" || dir == "keys" || dir == "sha256":
			what = dir + "/*" + filepath.Ext(what)
		}
	}
	return st + " " + step + " " + what
}

// down stops Toad if it runs, killed or not.
func (w *world) down() {
	if w.up {
		w.up = false
		w.stop()
	}
}

// raise starts Toad if it does not run, or was killed.
func (w *world) raise() {
	if w.up && w.alive() != nil {
		w.down()
	}
	if !w.up {
		w.start()
		w.up = true
	}
}

// deploy submits whatever the answer, as a client does; what was accepted is never forgotten.
func (w *world) deploy(image string) {
	w.keys++
	rec := w.s.rec.Load()
	if rec == nil {
		return
	}
	if op, _, err := w.s.submit(w.request(image, fmt.Sprintf("key-%d", w.keys))); err == nil {
		w.accepted = append(w.accepted, op.ID)
	} else {
		w.t.Logf("refused: %v", err)
	}
}

// settled brings everything back to health and demands that every accepted operation ended, and that
// the service takes a deployment to its promotion.
func (w *world) settled() {
	w.disarm()
	w.back()
	w.set(func() {
		w.h.registryDown, w.h.podmanHangs, w.h.managerHangs, w.h.signals = false, false, false, signalsAtOnce
		for _, a := range w.h.apps { // whatever nobody could kill dies at last
			a.unkillable = false
		}
	})
	w.raise()
	for end := time.Now().Add(6 * time.Hour); ; {
		time.Sleep(10 * time.Second)
		w.h.reap("hello.service")
		r := w.s.rec.Load()
		if w.s.usable() != nil {
		} else if r.duty() == watching {
			break
		} else if w.quiet(r) { // suspended: it stays down whatever comes, until it is resumed
			w.down()
			w.h.reboot()
			time.Sleep(time.Minute)
			w.expectRuns()
			w.raise()
			time.Sleep(time.Minute)
			w.expectRuns()
			w.asked(w.s.resume("local"))
		}
		if time.Now().After(end) {
			w.t.Fatalf("I3: after six hours the operation is %+v, held %+v, usable %v", w.s.op(), w.s.rec.Load().Held, w.s.usable())
		}
	}
	for _, id := range w.accepted {
		if op := w.s.op(); op != nil && op.ID == id {
			continue
		}
		if op, err := w.data.operation("hello", id); err != nil || !op.State.terminal() {
			w.t.Errorf("I3: the accepted operation %s is lost: %v", id, err)
		}
	}
	image := w.push("at last", app{readyAfter: time.Second})
	w.keys++
	op, _, err := w.s.submit(w.request(image, fmt.Sprintf("key-%d", w.keys)))
	if err != nil {
		w.t.Fatalf("a healthy service refuses a deployment: %v", err)
	}
	w.expect(w.await(op.ID), promoted, "")
	w.until("installed", func(r *record) bool { return r.Installed })
	w.expectRuns(image)
	if text := w.unitFile(); !strings.Contains(text, image) || !strings.Contains(text, "[Install]") {
		w.t.Errorf("the unit file is not the promoted revision's: %s", text)
	}
	w.chain()
}

// restorable is I6: with the registry gone and everything pruned, a failed candidate is rolled back to the
// target, and the retained revision can be deployed again.
func (w *world) restorable() {
	target, retained := w.s.rec.Load().Current, w.s.rec.Load().Rollback
	w.set(func() {
		if retained != nil { // whatever the world did to its app is over
			*w.h.apps[retained.digest()] = app{readyAfter: time.Second}
		}
	})
	lose := func() {
		w.set(func() { w.h.registryDown = true })
		w.h.prune()
	}
	w.keys++
	op, _, err := w.s.submit(w.request(w.push("bad at last", app{exitAfter: time.Second}), fmt.Sprintf("key-%d", w.keys)))
	must(w.t, err)
	w.accepted = append(w.accepted, op.ID)
	w.awaitState(op.ID, activating)
	lose()
	w.onMutation(func(string) (bool, error) { w.h.prune(); return true, nil })
	if op = w.await(op.ID); op.State != rolledBack {
		w.t.Errorf("I6: with the registry gone the target is not restored: %s (%v)", op.State, op.Failure)
	}
	w.expectRuns(target.Image)
	if retained == nil {
		return
	}
	w.keys++
	r := w.s.rec.Load()
	if op, _, err = w.s.submit(submission{kind: "rollback", key: fmt.Sprintf("key-%d", w.keys), hash: "h", actor: "local", expected: r.Generation}); err != nil {
		w.t.Fatalf("I6: the retained revision is refused: %v", err)
	}
	w.accepted = append(w.accepted, op.ID)
	if op = w.await(op.ID); op.State != promoted {
		w.t.Errorf("I6: with the registry gone the retained revision is not restored: %s (%v)", op.State, op.Failure)
	}
	w.onMutation(nil)
	w.until("installed", func(r *record) bool { return r.Installed })
	w.expectRuns(retained.Image)
}

// secretive is I12: nothing that a token can read has an environment value, a path of the host, or the
// text of a host's error.
func (w *world) secretive() {
	w.t.Helper()
	synctest.Wait()
	said := map[string]string{}
	for _, pattern := range []string{"events.jsonl", "operations/*.log"} {
		paths, err := filepath.Glob(w.data.serviceFile("hello", pattern))
		must(w.t, err)
		for _, p := range paths {
			b, err := os.ReadFile(p)
			must(w.t, err)
			said[filepath.Base(p)] = string(b)
		}
	}
	show := func(what string, v any) {
		b, err := json.Marshal(v)
		must(w.t, err)
		said[what] = string(b)
	}
	if w.s.rec.Load() != nil {
		show("the service", w.s.view(false))
		if d, err := w.s.dryRun(context.Background(), submission{kind: "deploy", image: testRepository + "@" + sha(nil), key: "dry", hash: "h", actor: "token:x"}, false); err == nil {
			show("a dry run", d)
		}
		if op := w.s.op(); op != nil {
			show("operation "+op.ID, w.s.wire(op))
		}
	}
	for _, id := range w.accepted {
		if op, err := w.data.operation("hello", id); err == nil {
			show("operation "+id, w.s.wire(op))
		}
	}
	for what, text := range said {
		for _, secret := range []string{canary, w.dir, w.h.quadlets, "/run/user/", "/user.slice", "7160 [app]"} {
			if i := strings.Index(text, secret); i >= 0 {
				w.t.Errorf("I12: %s has %q: …%s…", what, secret, text[max(0, i-80):min(len(text), i+len(secret)+40)])
			}
		}
	}
}

const bystanderUnit = "# toad data=aaaa service=bystander generation=1 operation=00000000000000000000000000\n[Container]\nContainerName=bystander\nImage=registry.example.org/apps/bystander@%s\nLabel=toad.service=bystander\n\n[Install]\nWantedBy=default.target\n"

// stander puts another service on the host, which runs.
func (w *world) stander() {
	image := w.h.push("registry.example.org/apps/bystander", "bystander", app{})
	path := filepath.Join(w.h.quadlets, "bystander", "bystander.container")
	must(w.t, os.Mkdir(filepath.Dir(path), 0o700))
	must(w.t, os.WriteFile(path, fmt.Appendf(nil, bystanderUnit, digestOf(image)), 0o600))
	w.h.reload()
	must(w.t, w.h.start("bystander.service"))
}

// bystander is I8: the other service was not touched, and its unit is still loaded.
func (w *world) bystander() {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	for _, m := range w.h.mutations {
		if strings.Contains(m, "bystander") {
			w.t.Errorf("I8: %s", m)
		}
	}
	u := w.h.units["bystander.service"]
	if u == nil { // there is none in this world
		return
	}
	b, err := os.ReadFile(filepath.Join(w.h.quadlets, "bystander", "bystander.container"))
	if err != nil || string(b) != u.text {
		w.t.Errorf("I8: the unit of another service was changed, or is not loaded: %v\n%s", err, u.text)
	}
	if c := u.container; c != nil && w.h.containers[c.ID] != c {
		w.t.Error("I8: the container of another service was removed")
	}
}

// endings are the events of a terminal state. Each operation has exactly one of them, once it has ended.
var endings = map[string]state{"promote": promoted, "rollback": rolledBack, "rollback-failed": hasFailed, "failed": hasFailed}

// chain verifies the whole event log against the record's head, and that of each operation there ever was
// it tells the acceptance and the end, both once.
func (w *world) chain() {
	synctest.Wait() // nobody is in the middle of a commit
	b, err := os.ReadFile(w.data.serviceFile("hello", "events.jsonl"))
	if err != nil {
		w.t.Fatal(err)
	}
	var head eventHead
	told := map[string][]string{} // by operation
	for line := range strings.Lines(string(b)) {
		var e event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			w.t.Fatalf("event %q: %v", line, err)
		}
		got := eventHead{e.Cursor, e.Hash}
		if head = e.seal(head); head != got {
			w.t.Fatalf("the chain of events is broken at %d", e.Cursor)
		}
		if _, end := endings[e.Type]; end || e.Type == "deploy" {
			told[e.Operation] = append(told[e.Operation], e.Type)
		}
	}
	r := w.s.rec.Load()
	operations := map[string]*operation{}
	ids, err := w.data.operationIDs("hello")
	must(w.t, err)
	for _, id := range ids {
		if operations[id], err = w.data.operation("hello", id); err != nil {
			w.t.Errorf("operation %s: %v", id, err)
			delete(operations, id)
		}
	}
	if r.Operation != nil {
		operations[r.Operation.ID] = r.Operation
	}
	for _, id := range w.accepted {
		if operations[id] == nil {
			w.t.Errorf("I3: the accepted operation %s is lost", id)
		}
	}
	for id, op := range operations {
		switch got := told[id]; {
		case len(got) == 0 || got[0] != "deploy":
			w.t.Errorf("the acceptance of %s is not told, only %v", id, got)
		case op.State.terminal() && (len(got) != 2 || endings[got[1]] != op.State || (got[1] == "rollback-failed") != (op.Failure != nil && op.Failure.Code == "rollback_failed")):
			w.t.Errorf("the events of %s, which is %s (%v), are %v", id, op.State, op.Failure, got)
		case !op.State.terminal() && len(got) != 1:
			w.t.Errorf("the events of %s, which is %s, are %v", id, op.State, got)
		}
		delete(told, id)
	}
	for id, got := range told {
		w.t.Errorf("there is no operation %s, and events %v of it", id, got)
	}
	last := r.EventHead
	for _, e := range r.Events {
		last = eventHead{e.Cursor, e.Hash}
	}
	if head != last {
		w.t.Errorf("the log ends at %d, the record at %d", head.Cursor, last.Cursor)
	}
}

// happening is one thing that happens to a world.
type happening struct {
	after time.Duration
	kind  string
	n     int
}

func (s happening) String() string {
	text := fmt.Sprintf("after %s: %s", s.after, s.kind)
	if s.kind == "deploy" {
		return text + " an app that " + behaviours[s.n%len(behaviours)].name
	} else if strings.HasPrefix(s.kind, "kill at") {
		return fmt.Sprintf("%s boundary %d from then", text, s.n)
	}
	return text
}

var behaviours = []struct {
	name string
	app  app
}{
	{"is good", app{readyAfter: time.Second}},
	{"is slowly ready", app{readyAfter: 20 * time.Second}},
	{"is never ready", app{readyAfter: -1}},
	{"crashes all the time", app{exitAfter: 2 * time.Second}},
	{"crashes as fast as it can", app{exitAfter: time.Millisecond, restartAfter: time.Millisecond, noLimit: true}},
	{"is ready and then restarts once", app{readyAfter: time.Second, exitAfter: 15 * time.Second, exitOnce: true}},
	{"is ready not for long enough", app{readyAfter: time.Second, readyFor: 10 * time.Second}},
	{"ends and is not restarted", app{exitAfter: 5 * time.Second, noRestart: true}},
	{"ignores SIGTERM", app{readyAfter: time.Second, ignoresTerm: true}},
	{"ignores SIGTERM and is never ready", app{readyAfter: -1, ignoresTerm: true}},
	{"cannot be killed", app{readyAfter: time.Second, unkillable: true}},
}

var happenings = []string{"deploy", "deploy", "deploy", "stop toad", "start toad", "restart toad", "kill at (before)", "kill at (after)", "kill at (error)",
	"kill at (before)", "restart by hand", "kill the main process", "podman hangs", "manager hangs", "podman and manager answer", "ask for rollback", "deploy the retained",
	"the wall clock steps ahead", "the wall clock steps back", "reboot", "reboot, another kernel", "prune", "registry down", "registry up",
	"signals are lost", "signals are late", "signals come", "suspend", "suspend", "resume"}

func (w *world) happen(i int, s happening) {
	time.Sleep(s.after)
	w.t.Logf("--- %s", s)
	if w.up && w.alive() != nil { // killed meanwhile: started again by whoever supervises it
		w.raise()
	}
	switch s.kind {
	case "deploy":
		if w.up {
			b := behaviours[s.n%len(behaviours)]
			w.deploy(w.push(fmt.Sprintf("%d", i), b.app))
		}
	case "deploy the retained":
		if w.up {
			w.keys++
			r := w.s.rec.Load()
			if op, _, err := w.s.submit(submission{kind: "rollback", key: fmt.Sprintf("key-%d", w.keys), hash: "h", actor: "local", expected: r.Generation}); err == nil {
				w.accepted = append(w.accepted, op.ID)
			}
		}
	case "suspend":
		if w.up {
			_, _ = w.s.suspend("local")
		}
	case "resume":
		if w.up {
			_, _ = w.s.resume("local")
		}
	case "stop toad":
		w.down()
	case "start toad":
		w.raise()
	case "restart toad":
		w.down()
		w.raise()
	case "kill at (before)":
		w.arm(s.n, notApplied, nil)
	case "kill at (after)":
		w.arm(s.n, notHeard, nil)
	case "kill at (error)":
		w.arm(s.n, errorApplied, nil)
	case "restart by hand":
		w.h.restartByHand("hello.service")
	case "kill the main process":
		w.h.kill("hello.service")
	case "podman hangs":
		w.set(func() { w.h.podmanHangs = true })
	case "manager hangs":
		w.set(func() { w.h.managerHangs = true })
	case "podman and manager answer":
		w.set(func() { w.h.podmanHangs, w.h.managerHangs = false, false })
	case "ask for rollback":
		if op := w.s.op(); w.up && op != nil {
			_, _, _ = w.s.requestRollback(op.ID, "local")
		}
	case "the wall clock steps ahead":
		w.set(func() { w.h.wallOffset += time.Hour })
	case "the wall clock steps back":
		w.set(func() { w.h.wallOffset -= time.Hour })
	case "reboot", "reboot, another kernel":
		w.down()
		w.h.reboot()
		if s.kind != "reboot" {
			w.set(func() { w.h.kernelBoot += "+" })
		}
	case "signals are lost":
		w.set(func() { w.h.signals = signalsLost })
	case "signals are late":
		w.set(func() { w.h.signals = signalsLate })
	case "signals come":
		w.set(func() { w.h.signals = signalsAtOnce })
	case "prune":
		w.h.prune()
	case "registry down":
		w.set(func() { w.h.registryDown = true })
	case "registry up":
		w.set(func() { w.h.registryDown = false })
	}
}

// TestRolloutKeepsItsPromises drives the rollout through random schedules: the invariants hold after
// every write, and at the end the service is as good as new.
func TestRolloutKeepsItsPromises(t *testing.T) {
	one := rapid.Custom(func(t *rapid.T) happening {
		return happening{
			after: time.Duration(rapid.SampledFrom([]int{0, 1, 50, 300, 700, 1000, 3000, 10_000, 35_000, 130_000}).Draw(t, "ms")) * time.Millisecond,
			kind:  rapid.SampledFrom(happenings).Draw(t, "what"),
			n:     rapid.IntRange(1, 60).Draw(t, "n"),
		}
	})
	rapid.Check(t, func(rt *rapid.T) {
		schedule := rapid.SliceOfN(one, 1, 14).Draw(rt, "schedule")
		f := explore(t, func(w *world) {
			w.stander()
			for i, s := range schedule {
				w.happen(i, s)
				w.secretive()
			}
			w.settled()
			w.restorable()
			w.chain()
			w.secretive()
			w.bystander()
		})
		if len(f.list) > 0 {
			var text strings.Builder
			for _, s := range schedule {
				fmt.Fprintf(&text, "  %s\n", s)
			}
			rt.Fatalf("this schedule breaks a promise:\n%s%s\n--- log\n%s", text.String(), strings.Join(f.list, "\n"), strings.Join(f.log[max(0, len(f.log)-80):], "\n"))
		}
	})
}
