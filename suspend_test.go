package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// asked demands that what was asked for was begun.
func (w *world) asked(changed bool, err error) {
	w.t.Helper()
	if err != nil || !changed {
		w.t.Fatalf("asked: changed %v, %v", changed, err)
	}
}

// refusedWith demands a refusal with that code.
func (w *world) refusedWith(code string, err error) *apiError {
	w.t.Helper()
	var e *apiError
	if !errors.As(err, &e) || e.Code != code {
		w.t.Fatalf("refused with %v, want %s", err, code)
	}
	return e
}

func (w *world) health(state string) {
	w.t.Helper()
	w.until2("health is "+state, func() bool { return w.s.view(true).Health.State == state })
}

// suspended is a promoted service that was brought down.
func suspended(w *world) *operation {
	op := w.promote("v1")
	w.asked(w.s.suspend("local"))
	w.health("stopped")
	return op
}

// barred is a service behind the barrier of a rolled back operation.
func barred(w *world) *operation {
	w.set(func() { w.en.Barrier = true })
	w.promote("v1")
	op := w.await(w.submit(w.push("bad", app{exitAfter: time.Second})).ID)
	w.expect(op, rolledBack, "restart_budget")
	return op
}

// retired is a service that was promoted twice, and whose enrollment went away.
func retired(w *world) {
	w.promote("v1")
	w.promote("v2")
	w.gone()
	w.asked(w.s.retire(2, "local"))
	w.until("retired", func(r *record) bool { return r.Retired != nil && r.Retired.Done })
}

// gone takes the enrollment away.
func (w *world) gone() { w.set(func() { w.enErr = fmt.Errorf("hello.json: %w", errNotFound) }) }

func (w *world) back() { w.set(func() { w.enErr = nil }) }

// A suspended service is stopped, stays down over reboots and restarts of Toad, takes no deployment, and
// runs its current revision again once it is resumed.
func TestSuspendedStaysDownUntilResumed(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		op := suspended(w)
		w.expectRuns()
		if text := w.unitFile(); text == "" || strings.Contains(text, "[Install]") {
			t.Errorf("its unit starts at boot, or is gone:\n%s", text)
		}
		if changed, err := w.s.suspend("local"); changed || err != nil {
			t.Errorf("suspended twice: %v, %v", changed, err)
		}
		v := w.s.view(false)
		if v.Suspended == nil || v.Suspended.By != "local" || len(v.Suspended.Remains) > 0 || v.Installed || v.Current == nil {
			t.Errorf("the view is %+v", v)
		}
		_, _, err := w.s.submit(w.request(w.push("v2", app{}), "while suspended"))
		w.refusedWith("suspended", err)

		for range 2 {
			w.stop()
			w.h.reboot()
			time.Sleep(time.Minute)
			w.expectRuns()
			w.start()
			w.health("stopped")
			time.Sleep(time.Minute)
			w.expectRuns()
		}
		// The image is pruned meanwhile, and the registry gone: all that is needed is kept.
		w.h.prune()
		w.set(func() { w.h.registryDown = true })
		w.asked(w.s.resume("local"))
		if changed, err := w.s.resume("local"); changed || err != nil {
			t.Errorf("resumed twice: %v, %v", changed, err)
		}
		w.until2("ready again", func() bool { return w.s.view(true).Health.Ready })
		w.expectRuns(op.Candidate.Image)
		if r := w.s.rec.Load(); r.Generation != 1 || !r.Installed || r.Operation.ID != op.ID {
			t.Errorf("resuming made %+v", r)
		}
		if !strings.Contains(w.unitFile(), "[Install]") {
			t.Error("the unit of a resumed service does not start at boot")
		}
		want := []string{"deploy", "activate", "promote", "suspend", "resume"}
		if got := w.eventTypes(); !slices.Equal(got, want) {
			t.Errorf("events %v, want %v", got, want)
		}
		w.set(func() { w.h.registryDown = false })
		w.promote("v2")
	})
}

// Whoever starts a suspended service by hand, it is stopped again; nothing is told of it as of a service
// that should run.
func TestSuspendedIsStoppedAgain(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		suspended(w)
		before := w.eventTypes()
		must(t, w.h.start("hello.service"))
		time.Sleep(5 * time.Second)
		w.health("stopped")
		w.expectRuns()
		time.Sleep(time.Hour)
		if got := w.eventTypes(); !slices.Equal(got, before) {
			t.Errorf("events %v, before %v", got, before)
		}
	})
}

func TestSuspendIsRefused(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		_, err := w.s.suspend("local")
		w.refusedWith("no_revision", err)
		if changed, err := w.s.resume("local"); changed || err != nil {
			t.Errorf("resuming what is not suspended: %v, %v", changed, err)
		}
		op := w.submit(w.push("v1", app{}))
		_, err = w.s.suspend("local")
		if e := w.refusedWith("rollout_active", err); e.OperationID != op.ID {
			t.Errorf("it names %q", e.OperationID)
		}
		w.expect(w.await(op.ID), promoted, "")
		w.s.live.Lock()
		w.s.live.closing = true
		w.s.live.Unlock()
		_, err = w.s.suspend("local")
		w.refusedWith("shutting_down", err)
	})
}

// An instance that cannot be proven dead: the service is suspended, says what is still there, and goes on
// trying. It can be resumed all the same, which starts nothing beside what still lives.
func TestSuspendedCannotBeProvenDead(t *testing.T) {
	for _, resumed := range []bool{false, true} {
		t.Run(fmt.Sprintf("resumed %v", resumed), func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				image := w.push("stuck", app{readyAfter: time.Second, unkillable: true})
				w.expect(w.await(w.submit(image).ID), promoted, "")
				w.until("installed", func(r *record) bool { return r.Installed })
				w.asked(w.s.suspend("local"))
				w.until("it says what is there", func(r *record) bool { return len(r.Suspended.Remains) > 0 })
				if v := w.s.view(false); v.Health.State == "stopped" || len(v.Suspended.Remains) == 0 {
					t.Errorf("health %+v, suspended %+v", v.Health, v.Suspended)
				}
				w.restart()
				time.Sleep(2 * time.Minute)
				if resumed {
					w.asked(w.s.resume("local"))
					time.Sleep(time.Minute)
				}
				w.set(func() { w.h.apps[digestOf(image)].unkillable = false })
				w.h.reap("hello.service")
				if resumed {
					w.until2("ready again", func() bool { return w.s.view(true).Health.Ready })
					w.expectRuns(image)
					return
				}
				w.health("stopped")
				if r := w.s.rec.Load(); len(r.Suspended.Remains) > 0 {
					t.Errorf("still said to be there: %v", r.Suspended.Remains)
				}
			})
		})
	}
}

// A hold ends in the suspension: the current revision, which was being stopped, is not started again.
func TestHeldAndSuspended(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		image := w.push("stuck", app{readyAfter: time.Second, unkillable: true})
		w.expect(w.await(w.submit(image).ID), promoted, "")
		w.expect(w.await(w.submit(w.push("v2", app{})).ID), hasFailed, "termination_unconfirmed")
		w.asked(w.s.suspend("local"))
		_, _, err := w.s.submit(w.request(image, "both"))
		w.refusedWith("suspended", err)
		w.set(func() { w.h.apps[digestOf(image)].unkillable = false })
		w.h.reap("hello.service")
		w.until("the hold is over", func(r *record) bool { return r.Held == nil })
		w.health("stopped")
		w.expectRuns()
		w.asked(w.s.resume("local"))
		w.until2("ready again", func() bool { return w.s.view(true).Health.Ready })
		w.expectRuns(image)
	})
}

// The host does not answer while a service is suspended and resumed: both are done once it does.
func TestSuspendWhileTheHostHangs(t *testing.T) {
	for _, what := range []string{"podman", "manager"} {
		t.Run(what, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				hang := func(on bool) {
					w.set(func() {
						if what == "podman" {
							w.h.podmanHangs = on
						} else {
							w.h.managerHangs = on
						}
					})
				}
				op := w.promote("v1")
				hang(true)
				w.asked(w.s.suspend("local"))
				time.Sleep(3 * time.Minute)
				if v := w.s.view(false); v.Suspended == nil || v.Health.State == "stopped" {
					t.Errorf("%+v, %+v", v.Suspended, v.Health)
				}
				hang(false)
				w.health("stopped")
				hang(true)
				w.asked(w.s.resume("local"))
				time.Sleep(3 * time.Minute)
				hang(false)
				w.until2("ready again", func() bool { return w.s.view(true).Health.Ready })
				w.expectRuns(op.Candidate.Image)
			})
		})
	}
}

// On a full disk a suspension is refused, or it holds: it is never answered and forgotten.
func TestSuspendOnAFullDisk(t *testing.T) {
	for _, step := range []string{"keep", "write", "replace", "syncdir", "append"} {
		t.Run(step, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.promote("v1")
				w.set(func() {
					w.spoil = func(at, path string) error {
						if at == step && strings.HasPrefix(path, w.dir) {
							return syscall.ENOSPC
						}
						return nil
					}
				})
				_, err := w.s.suspend("local")
				w.refusedWith("state_unavailable", err)
				time.Sleep(time.Minute)
				w.set(func() { w.spoil = nil })
				w.until2("usable again", func() bool { return w.s.usable() == nil })
				if _, err := w.s.suspend("local"); err != nil {
					t.Fatal(err)
				}
				w.health("stopped")
				w.expectRuns()
			})
		})
	}
}

// A unit of another hand under the service's name is left alone.
func TestSuspendedUnitIsAnothers(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		op := w.promote("v1")
		w.stop()
		other := strings.Replace(w.unitFile(), "# toad data=", "# mine data=", 1)
		must(t, os.WriteFile(w.s.unitPath(w.en.Unit), []byte(other), 0o600))
		w.h.reload()
		w.start()
		w.asked(w.s.suspend("local"))
		w.until("it says so", func(r *record) bool { return len(r.Suspended.Remains) > 0 })
		time.Sleep(time.Minute)
		w.expectRuns(op.Candidate.Image)
		if w.unitFile() != other {
			t.Error("the unit of another hand was replaced")
		}
	})
}

// A deployment that comes before the resumed revision was started takes over; if it ends before it touched
// anything, the start that was asked for is made.
func TestDeploymentWhileResuming(t *testing.T) {
	for _, good := range []bool{true, false} {
		t.Run(fmt.Sprintf("good %v", good), func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				op := suspended(w)
				w.set(func() { w.h.podmanHangs = true })
				w.asked(w.s.resume("local"))
				time.Sleep(time.Second)
				next := w.submit(w.push("v2", app{readyAfter: time.Second}))
				w.set(func() { w.h.podmanHangs, w.h.registryDown = false, !good })
				if good {
					w.expect(w.await(next.ID), promoted, "")
					time.Sleep(time.Minute)
					w.expectRuns(next.Candidate.Image)
					if got := w.h.ran[op.ID]; got != 1 {
						t.Errorf("the revision before was started %d times", got)
					}
					return
				}
				w.expect(w.await(next.ID), hasFailed, "fetch_failed")
				w.until2("ready again", func() bool { return w.s.view(true).Health.Ready })
				w.expectRuns(op.Candidate.Image)
			})
		})
	}
}

// A retired service is gone from the host: instance, unit, images. Its records stay, and a later enrollment
// of that name goes on with its generations.
func TestRetired(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		op := w.promote("v2")
		_, err := w.s.retire(2, "local")
		w.refusedWith("enrolled", err)
		_, secret, err := w.s.issue("local", "ci", []string{"read"}, 0)
		must(t, err)
		w.gone()
		_, err = w.s.retire(1, "local")
		if e := w.refusedWith("stale_generation", err); *e.CurrentGeneration != 2 {
			t.Errorf("it names generation %d", *e.CurrentGeneration)
		}
		w.asked(w.s.retire(2, "local"))
		if changed, err := w.s.retire(2, "local"); changed || err != nil {
			t.Errorf("retired twice: %v, %v", changed, err)
		}
		_, err = w.s.suspend("local")
		w.refusedWith("suspended", err)
		w.until("retired", func(r *record) bool { return r.Retired.Done })
		w.expectRuns()
		if text := w.unitFile(); text != "" {
			t.Errorf("its unit is still there:\n%s", text)
		}
		if holder := w.s.index.holder(http.Header{"Authorization": {"Bearer " + secret}}); holder == nil || holder.valid(time.Now()) {
			t.Errorf("its token is in force: %+v", holder)
		}
		if _, err := os.Stat(w.s.images()); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("its images are still there: %v", err)
		}
		if v := w.s.view(false); v.Retired == nil || !v.Retired.Done || v.Current != nil || v.Rollback != nil || v.Generation != 2 || v.Health.State != "stopped" {
			t.Errorf("the view is %+v", v)
		}
		if _, claimed := w.s.claim(); claimed {
			t.Error("its names are still claimed")
		}
		if _, err := w.data.operation("hello", op.ID); err != nil {
			t.Errorf("its history is gone: %v", err)
		}
		if all := w.findings(); len(all) > 0 {
			t.Errorf("fsck finds %v", all)
		}
		w.stop()
		w.h.reboot()
		w.start()
		time.Sleep(time.Minute)
		w.expectRuns()

		w.back()
		again := w.submit(w.push("v3", app{readyAfter: time.Second}))
		if again.Candidate.Generation != 3 || again.Previous != nil {
			t.Errorf("it goes on with %+v", again)
		}
		w.expect(w.await(again.ID), promoted, "")
		if r := w.s.rec.Load(); r.Retired != nil || r.Generation != 3 {
			t.Errorf("after a new enrollment it is %+v", r)
		}
		w.chain()
	})
}

// Every kind of service can be retired: one that was never deployed, one whose first candidate failed, one
// that is suspended, one that is held.
func TestRetiredFromEveryState(t *testing.T) {
	for name, before := range map[string]func(w *world){
		"never deployed": func(w *world) {},
		"first candidate failed": func(w *world) {
			w.expect(w.await(w.submit(w.push("bad", app{readyAfter: -1})).ID), hasFailed, "no_rollback_target")
		},
		"suspended":        func(w *world) { suspended(w) },
		"behind a barrier": func(w *world) { barred(w) },
		"held": func(w *world) {
			image := w.push("stuck", app{readyAfter: -1, unkillable: true})
			w.expect(w.await(w.submit(image).ID), hasFailed, "termination_unconfirmed")
			time.AfterFunc(3*time.Minute, func() { w.h.reap("hello.service") })
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				before(w)
				w.gone()
				w.asked(w.s.retire(w.s.rec.Load().Generation, "local"))
				w.until("retired", func(r *record) bool { return r.Retired.Done })
				w.expectRuns()
				if w.unitFile() != "" {
					t.Error("its unit is still there")
				}
				if all := w.findings(); len(all) > 0 {
					t.Errorf("fsck finds %v", all)
				}
				w.back()
				op := w.await(w.submit(w.push("v9", app{readyAfter: time.Second})).ID)
				w.expect(op, promoted, "")
			})
		})
	}
}

// The barrier: an operation that went wrong closes the service, whatever generation a request names, until
// it is acknowledged by name.
func TestBarrier(t *testing.T) { // G9
	inWorld(t, func(t *testing.T, w *world) {
		op := barred(w)
		good := w.push("v3", app{readyAfter: time.Second})
		for name, sub := range map[string]submission{
			"a deployment":                     w.request(good, "k1"),
			"the old job, with its generation": {kind: "deploy", image: good, key: "k2", hash: "h", actor: "local"},
			"a rollback":                       {kind: "deploy", image: w.s.rec.Load().Current.Image, key: "k3", hash: "h", actor: "local", expected: 1},
		} {
			_, _, err := w.s.submit(sub)
			if e := w.refusedWith("rollback_barrier", err); e.OperationID != op.ID {
				t.Errorf("%s: it names %q", name, e.OperationID)
			}
		}
		v := w.s.view(false)
		if v.Barrier == nil || v.Barrier.OperationID != op.ID || !slices.Contains(v.Actions, wireAction{Name: "reconcile", Enabled: true}) ||
			!slices.Contains(v.Actions, wireAction{Name: "deploy", Reason: "rollback_barrier"}) {
			t.Errorf("barrier %+v, actions %+v", v.Barrier, v.Actions)
		}
		_, err := w.s.reconcile(op.Previous.Operation, "local")
		if e := w.refusedWith("rollback_barrier", err); e.OperationID != op.ID {
			t.Errorf("it names %q", e.OperationID)
		}
		w.restart()
		id, _, err := w.s.issue("local", "ci", []string{"deploy"}, 0)
		must(t, err)
		_, err = w.s.reconcile(op.ID, "token:x") // one that was revoked meanwhile
		w.refusedWith("unauthorized", err)
		w.asked(w.s.reconcile(op.ID, "token:"+id.ID))
		if changed, err := w.s.reconcile(op.ID, "local"); changed || err != nil {
			t.Errorf("acknowledged twice: %v, %v", changed, err)
		}
		_, err = w.s.reconcile(noSuchID, "local")
		w.refusedWith("not_found", err)
		if got := w.eventTypes(); got[len(got)-1] != "reconcile" {
			t.Errorf("events %v", got)
		}
		w.expect(w.await(w.submit(good).ID), promoted, "")
	})
}

func TestWhatRaisesTheBarrier(t *testing.T) {
	for name, tt := range map[string]struct {
		run  func(w *world) *operation
		want bool
	}{
		"promoted": {func(w *world) *operation { return w.promote("v2") }, false},
		"failed before activation": {func(w *world) *operation {
			w.set(func() { w.h.registryDown = true })
			return w.await(w.submit(w.push("v2", app{})).ID)
		}, false},
		"cancelled before activation": {func(w *world) *operation {
			op := w.submit(w.push("v2", app{}))
			_, _, err := w.s.requestRollback(op.ID, "local")
			must(w.t, err)
			return w.await(op.ID)
		}, false},
		"rolled back": {func(w *world) *operation { return w.await(w.submit(w.push("v2", app{readyAfter: -1})).ID) }, true},
		"rolled back by request": {func(w *world) *operation {
			op := w.submit(w.push("v2", app{}))
			w.awaitState(op.ID, inProbation)
			_, _, err := w.s.requestRollback(op.ID, "local")
			must(w.t, err)
			return w.await(op.ID)
		}, true},
		"failed rollback": {func(w *world) *operation {
			w.set(func() { w.h.apps[w.s.rec.Load().Current.digest()].readyAfter = -1 })
			return w.await(w.submit(w.push("v2", app{exitAfter: time.Second})).ID)
		}, true},
		"rolled back after promotion": {func(w *world) *operation {
			w.promote("v2")
			op, _, err := w.s.submit(submission{kind: "rollback", key: "back", hash: "h", actor: "local", expected: 2})
			must(w.t, err)
			return w.await(op.ID)
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			for _, enrolled := range []bool{true, false} {
				inWorld(t, func(t *testing.T, w *world) {
					w.set(func() { w.en.Barrier = enrolled })
					w.promote("v1")
					op := tt.run(w)
					if b := w.s.rec.Load().Barrier; (b != nil) != (tt.want && enrolled) || b != nil && b.Operation != op.ID {
						t.Errorf("enrolled %v: the barrier is %+v", enrolled, b)
					}
				})
			}
		})
	}
}

// A restore keeps a service suspended, retired or closed, whichever the record or the log says.
func TestRestoreKeepsWhatWasAsked(t *testing.T) {
	for name, tt := range map[string]struct {
		before func(w *world)
		ok     func(r *record) bool
	}{
		"suspended": {func(w *world) {
			suspended(w)
			must(w.t, w.s.commit(func(*record) error { return nil })) // the predecessor knows of it, too
		}, func(r *record) bool { return r.Suspended != nil }},
		"suspended since": {func(w *world) {
			w.promote("v1")
			w.set(func() { w.h.managerHangs = true }) // nothing follows from it in time
			w.asked(w.s.suspend("local"))
		}, func(r *record) bool { return r.Suspended != nil }},
		"resumed since": {func(w *world) {
			suspended(w)
			w.set(func() { w.h.managerHangs = true })
			w.asked(w.s.resume("local"))
		}, func(r *record) bool { return r.Suspended == nil && r.Resume != nil }},
		"retired since": {func(w *world) {
			w.promote("v1")
			w.gone()
			w.set(func() { w.h.managerHangs = true })
			w.asked(w.s.retire(1, "local"))
		}, func(r *record) bool { return r.Retired != nil && !r.Retired.Done }},
		"closed": {func(w *world) {
			barred(w)
			must(w.t, w.s.commit(func(*record) error { return nil }))
		}, func(r *record) bool { return r.Barrier != nil }},
		"acknowledged since": {func(w *world) {
			op := barred(w)
			time.Sleep(time.Minute)
			w.asked(w.s.reconcile(op.ID, "local"))
		}, func(r *record) bool { return r.Barrier == nil }},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				tt.before(w)
				w.stop()
				defer w.start()
				w.set(func() { w.h.managerHangs = false })
				must(t, os.WriteFile(w.data.serviceFile("hello", "service.json"), []byte("{"), 0o600))
				if _, err := w.data.restoreNamed("services/hello/service.json", w.runningNow, w.s.now()); err != nil {
					t.Fatal(err)
				}
				r := &record{}
				must(t, readRecord(w.data.serviceFile("hello", "service.json"), r))
				must(t, r.check())
				if !tt.ok(r) {
					t.Errorf("restored: suspended %+v, resume %+v, barrier %+v, retired %+v", r.Suspended, r.Resume, r.Barrier, r.Retired)
				}
				w.mu.Lock()
				w.last = nil // an operation may be ended by it
				w.mu.Unlock()
			})
		})
	}
}

// The operation that raised the barrier is never pruned.
func TestPruneKeepsTheBarriersOperation(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		op := barred(w)
		time.Sleep(time.Second)
		r := w.s.rec.Load().clone()
		r.Operation = nil
		now := w.s.now().Add(3 * keepAge)
		for i := range keepOperations + 1 {
			o := *op
			o.ID, o.Key = newOperationID(now.Add(time.Duration(i)*time.Millisecond)), ""
			must(t, writeRecord(w.data.serviceFile("hello", "operations", o.ID+".json"), &archived{Version: 1, Service: "hello", Operation: o}))
		}
		must(t, w.data.prune(r, now))
		if _, err := w.data.operation("hello", op.ID); err != nil {
			t.Error(err)
		}
	})
}

// A dry run makes every check in order and stores nothing.
func TestDryRun(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		image := w.push("hello", "1", app{})
		w.await(w.deploy("hello", image, 0, "k1").ID, "promoted")
		bad := w.push("hello", "bad", app{exitAfter: time.Second})
		failed := w.await(w.deploy("hello", bad, 1, "k2").ID, "rolled_back")
		time.Sleep(time.Minute)
		synctest.Wait()
		before := w.state()
		try := func(service, image string, expected int64, key string) (d wireDryRun) {
			t.Helper()
			a := w.do("POST", "/v1/deployments?dry_run=true", deployBody(service, image, expected, key))
			if a.status != 200 {
				t.Fatalf("status %d: %s", a.status, a.body)
			}
			must(t, json.Unmarshal([]byte(a.body), &d))
			return d
		}
		outcomes := func(d wireDryRun) string {
			var list []string
			for _, c := range d.Checks {
				text := c.Name
				if c.Outcome != "passed" {
					text += "=" + c.Outcome + " " + c.Code
				}
				list = append(list, strings.TrimSpace(text))
			}
			return strings.Join(list, ", ")
		}
		want := func(what string, d wireDryRun, accepted bool, checks string) {
			t.Helper()
			if got := outcomes(d); got != checks || d.Accepted != accepted {
				t.Errorf("%s: accepted %v: %s\nwant %v: %s", what, d.Accepted, got, accepted, checks)
			}
		}
		next := w.push("hello", "3", app{})
		d := try("hello", next, 1, "new")
		want("good", d, true, "key, shutting_down, enrollment, repository, suspended, held, barrier, rollout, generation, token, room, image")
		if d.Generation != 3 || d.Current.Generation != 1 || d.Candidate.Digest != digestOf(next) || d.FailedBefore != nil || d.Target == nil || !d.Target.Ready {
			t.Errorf("%+v, target %+v", d, d.Target)
		}
		if want := []wireChange{{"Container", "Image", "changed"}}; !slices.Equal(d.UnitChanges, want) || !strings.Contains(d.UnitDiff, "+Image="+next) || !strings.Contains(d.UnitDiff, "-Image="+image) {
			t.Errorf("changes %v\n%s", d.UnitChanges, d.UnitDiff)
		}
		if d = try("hello", bad, 1, "new"); d.FailedBefore == nil || d.FailedBefore.OperationID != failed.ID || d.FailedBefore.Code != "restart_budget" {
			t.Errorf("failed before: %+v", d.FailedBefore)
		}
		want("used key, stale", try("hello", image, 7, "k1"), false, "key=refused key_reused, shutting_down, enrollment, repository, suspended, held, barrier, rollout, generation=refused stale_generation, token, room, image")
		want("foreign", try("hello", strings.Replace(image, "hello", "other", 1), 1, "new"), false, "key, shutting_down, enrollment, repository=refused repository_not_allowed, suspended, held, barrier, rollout, generation, token, room, image=skipped")
		missing := "registry.example.org/apps/hello@" + sha([]byte("nothing"))
		want("missing", try("hello", missing, 1, "new"), false, "key, shutting_down, enrollment, repository, suspended, held, barrier, rollout, generation, token, room, image=refused fetch_failed")
		d = try("broken", strings.Replace(image, "hello", "broken", 1), 0, "new")
		want("broken", d, false, "key, shutting_down, enrollment=refused enrollment_invalid, repository=skipped, suspended, held, barrier, rollout, generation, token, room, image=skipped")
		if d.Target != nil || d.Current != nil {
			t.Errorf("%+v", d)
		}
		w.refused("form", w.do("POST", "/v1/deployments?dry_run=true", "{}"), 400, "invalid_request", "service")
		w.refused("no such service", w.do("POST", "/v1/deployments?dry_run=true", deployBody("nobody", image, 1, "new")), 404, "not_found", "")
		w.refused("neither", w.do("POST", "/v1/deployments?dry_run=maybe", deployBody("hello", image, 1, "new")), 400, "invalid_request", "dry_run")

		// A token's answer tells which keys differ and no value of them.
		s, err := w.d.service("hello")
		must(t, err)
		en, err := s.enroll()
		must(t, err)
		en.Template = []byte(strings.Replace(string(en.Template), canary, canary+"-too", 1) + "\n[Service]\nRestart=always\n")
		s.enroll = func() (enrolled, error) { return en, nil }
		for _, local := range []bool{true, false} {
			d, err := s.dryRun(t.Context(), submission{kind: "deploy", image: next, expected: 1, key: "new", hash: "h", actor: "local"}, local)
			must(t, err)
			b, err := json.Marshal(d)
			must(t, err)
			if strings.Contains(string(b), canary) != local {
				t.Errorf("local %v: %s", local, b)
			}
			if want := []wireChange{{"Container", "Environment", "changed"}, {"Service", "Restart", "added"}, {"Container", "Image", "changed"}}; !slices.Equal(d.UnitChanges, want) {
				t.Errorf("changes %v", d.UnitChanges)
			}
		}
		if after := w.state(); after != before {
			t.Errorf("something was changed; before:\n%s\nafter:\n%s", before, after)
		}
	})
}

func TestSuspendAPI(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		w.refused("no revision", w.do("POST", "/v1/services/hello/suspend", ""), 409, "no_revision", "")
		image := w.push("hello", "1", app{})
		w.await(w.deploy("hello", image, 0, "k1").ID, "promoted")
		view := func(a apiAnswer, status int) (v wireService) {
			t.Helper()
			if a.status != status {
				t.Fatalf("status %d: %s", a.status, a.body)
			}
			must(t, json.Unmarshal([]byte(a.body), &v))
			return v
		}
		if v := view(w.do("POST", "/v1/services/hello/suspend", "{}"), 202); v.Suspended == nil || v.Health.State == "running" {
			t.Errorf("%+v", v)
		}
		view(w.do("POST", "/v1/services/hello/suspend", ""), 200)
		time.Sleep(time.Minute)
		v := view(w.do("GET", "/v1/services/hello", ""), 200)
		if v.Health.State != "stopped" || !slices.Contains(v.Actions, wireAction{Name: "resume", Enabled: true}) || !slices.Contains(v.Actions, wireAction{Name: "suspend", Reason: "suspended"}) {
			t.Errorf("%+v", v)
		}
		w.refused("deployment", w.do("POST", "/v1/deployments", deployBody("hello", image, 1, "k2")), 409, "suspended", "")
		w.refused("rollback", w.do("POST", "/v1/services/hello/rollback", `{"expected_generation":1,"idempotency_key":"k3"}`), 409, "not_rollbackable", "")
		metrics := w.do("GET", "/metrics", "").body
		for _, line := range []string{`toad_service_suspended{service="hello"} 1`, `toad_services{state="stopped"} 3`, `toad_operations_total{service="hello",outcome="promoted"} 1`,
			`toad_service_generation{service="hello"} 1`, `toad_service_ready{service="hello"} 0`, `toad_service_rollback_ready{service="hello"} 0`} {
			if !strings.Contains(metrics, line+"\n") {
				t.Errorf("no %s in:\n%s", line, metrics)
			}
		}
		view(w.do("POST", "/v1/services/hello/resume", ""), 202)
		view(w.do("POST", "/v1/services/hello/resume", ""), 200)
		time.Sleep(time.Minute)
		if v := view(w.do("GET", "/v1/services/hello", ""), 200); !v.Health.Ready || v.Suspended != nil || !v.Installed {
			t.Errorf("%+v", v)
		}
		w.refused("still enrolled", w.do("POST", "/v1/services/hello/retire", `{"generation":1}`), 409, "enrolled", "")
		s, err := w.d.service("hello")
		must(t, err)
		s.enroll = func() (enrolled, error) { return enrolled{}, errNotFound }
		w.refused("stale", w.do("POST", "/v1/services/hello/retire", `{"generation":0}`), 409, "stale_generation", "")
		view(w.do("POST", "/v1/services/hello/retire", `{"generation":1}`), 202)
		time.Sleep(time.Minute)
		if v := view(w.do("POST", "/v1/services/hello/retire", `{"generation":1}`), 200); !v.Retired.Done || v.Generation != 1 {
			t.Errorf("%+v", v)
		}
		if a := w.do("POST", "/v1/fsck", ""); !strings.Contains(a.body, `"ok": true`) {
			t.Errorf("fsck: %s", a.body)
		}
	})
}

// views makes a fake server answer each request with the next view, the last one for ever.
func (f *fakeToad) views(list ...wireService) {
	f.intercept = func(w http.ResponseWriter, method string, n int) bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		cliAnswer(w, 200, list[0])
		if len(list) > 1 {
			list = list[1:]
		}
		return true
	}
}

func TestClientSuspend(t *testing.T) {
	at := wireTime(cliTime)
	enrolledAs := wireEnrollment{Valid: true, Repository: "r"}
	running := wireService{Service: "hello", Generation: 7, Installed: true, Enrollment: enrolledAs, Actions: []wireAction{}, Health: wireHealth{State: "running", Ready: true}}
	going := wireService{Service: "hello", Generation: 7, Suspended: &wireSuspended{Since: at, By: "local", Remains: []string{"the unit is active (running)"}}, Enrollment: enrolledAs, Actions: []wireAction{}, Health: wireHealth{State: "unknown"}}
	down := going
	down.Health, down.Suspended = wireHealth{State: "stopped"}, &wireSuspended{Since: at, By: "local", Remains: []string{}}
	failed := running
	failed.Health = wireHealth{State: "failed"}
	retiring := wireService{Service: "hello", Generation: 7, Retired: &wireRetired{Since: at, By: "local", Remains: []string{}}, Actions: []wireAction{}, Enrollment: wireEnrollment{Problem: "gone"}, Health: wireHealth{State: "unknown"}}
	retired := retiring
	retired.Retired = &wireRetired{Since: at, By: "local", Done: true, Remains: []string{}}
	for _, tt := range []struct {
		args           []string
		views          []wireService
		status         int
		stdout, stderr string
		requests       []string
	}{
		{[]string{"suspend", "hello"}, []wireService{going, down}, 0, "suspended: hello is stopped and stays down\n",
			"suspending hello: health is unknown; still there: the unit is active (running)\n",
			[]string{"POST /v1/services/hello/suspend", "GET /v1/services/hello"}},
		{[]string{"suspend", "hello", "--no-wait"}, []wireService{going}, 0, "suspending hello goes on\n", "", []string{"POST /v1/services/hello/suspend"}},
		{[]string{"resume", "hello"}, []wireService{running}, 0, "resumed: hello is ready\n", "", []string{"POST /v1/services/hello/resume"}},
		{[]string{"resume", "hello"}, []wireService{failed}, 1, "", "toad: resuming hello: it was started and failed\nhint: see toad status hello --socket SOCKET\n", []string{"POST /v1/services/hello/resume"}},
		{[]string{"retire", "hello"}, []wireService{running, retired}, 0, "retired: hello is gone, its records stay\n", "", []string{"GET /v1/services/hello", "POST /v1/services/hello/retire"}},
		{[]string{"reconcile", "hello"}, []wireService{running}, 0, "hello has no barrier\n", "", []string{"GET /v1/services/hello"}},
		{[]string{"reconcile", "hello", cliID}, []wireService{running}, 0, "reconciled: operation " + cliID + " is acknowledged, hello takes deployments again\n", "", []string{"POST /v1/services/hello/reconcile"}},
	} {
		t.Run(strings.Join(tt.args, " "), func(t *testing.T) {
			f := newFakeToad(t)
			f.views(tt.views...)
			status, stdout, stderr := f.toad(tt.args...)
			stderr = strings.ReplaceAll(stderr, f.socket, "SOCKET")
			if status != tt.status || stdout != tt.stdout || stderr != tt.stderr {
				t.Errorf("status %d, stdout %q, stderr %q\nwant %d, %q, %q", status, stdout, stderr, tt.status, tt.stdout, tt.stderr)
			}
			f.seen(t, tt.requests...)
		})
	}

	closed := running
	closed.Barrier = &wireBarrier{cliID, at}
	f := newFakeToad(t)
	f.views(closed)
	if status, _, _ := f.toad("reconcile", "hello"); status != 0 || f.posted()[0] != `{"operation_id":"`+cliID+`"}` {
		t.Errorf("status %d, posted %q", status, f.posted())
	}
	for _, tt := range []struct {
		s    wireService
		want []string
	}{
		{going, []string{"suspended   since 2026-11-24 09:30:00Z, by local; still there: the unit is active (running)"}},
		{closed, []string{"barrier     since 2026-11-24 09:30:00Z, by operation " + cliID + ": no deployment is taken until it is acknowledged"}},
		{retiring, []string{"retired     under way, 2026-11-24 09:30:00Z, by local"}},
	} {
		f.views(tt.s)
		_, stdout, _ := f.toad("status", "hello")
		wantParts(t, "status", stdout, tt.want...)
	}
}

func TestClientDryRun(t *testing.T) {
	d := wireDryRun{Service: "hello", Accepted: false, Generation: 8, Candidate: wireCandidate{cliImage, cliDigest}, Current: &wireRevision{Generation: 7, Image: cliImage, Digest: cliDigest},
		Checks:       []wireCheck{{Name: "key", Outcome: "passed"}, {Name: "generation", Outcome: "refused", Code: "stale_generation", Detail: "it is 7"}, {Name: "image", Outcome: "skipped"}},
		UnitChanges:  []wireChange{{"Container", "Image", "changed"}},
		UnitDiff:     "--- current\n+++ candidate\n-Image=a\n+Image=b\n",
		FailedBefore: &wireFailedBefore{cliID, "rolled_back", "restart_budget", wireTime(cliTime)},
		Target:       &wireTarget{Generation: 7, Digest: cliDigest, Problems: []wireProblem{{"image_missing", "its image is gone"}}}}
	f := newFakeToad(t)
	f.intercept = func(w http.ResponseWriter, method string, n int) bool {
		if method == http.MethodPost {
			cliAnswer(w, 200, d)
		}
		return method == http.MethodPost
	}
	status, stdout, stderr := f.toad("deploy", "hello", cliImage, "--dry-run")
	want := `service     hello: the deployment would be refused
current     generation 7, ` + cliImage + `
candidate   generation 8, ` + cliImage + `
checks      key passed
            generation refused: stale_generation: it is 7
            image skipped
before      this digest ended rolled_back (restart_budget) in operation ` + cliID + ` at 2026-11-24 09:30:00Z
target      generation 7, not ready
            image_missing: its image is gone
unit        [Container] Image= changed
--- current
+++ candidate
-Image=a
+Image=b
`
	if stdout != want || status != 1 || stderr != "" {
		t.Errorf("status %d, stderr %q, stdout:\n%s", status, stderr, stdout)
	}
	f.seen(t, "GET /v1/services/hello", "POST /v1/deployments?dry_run=true")
	d.Accepted = true
	if status, stdout, _ := f.toad("deploy", "hello", cliImage, "--dry-run", "--json", "--expect", "7"); status != 0 || !strings.Contains(stdout, `"would_be_accepted": true`) {
		t.Errorf("status %d: %s", status, stdout)
	}
}

// retiresOpen demands that a retirement does not end, says what is in its way, and never closes the service.
func (w *world) retiresOpen() {
	w.t.Helper()
	for range 10 {
		time.Sleep(30 * time.Second) // on the fake clock
		if err := w.s.usable(); err != nil {
			w.t.Errorf("closed: %v", errors.Unwrap(err))
		}
	}
	if r := w.s.rec.Load().Retired; r.Done || len(r.Remains) == 0 {
		w.t.Errorf("retired: %+v", r)
	}
}

// A damaged tokens.json is in the way of a retirement, which says so and goes on once it is put back. It is no
// reason to close the service.
func TestRetireWithDamagedTokens(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		_, _, err := w.s.issue("local", "ci", []string{"read"}, 0)
		must(t, err)
		w.stop()
		must(t, os.WriteFile(w.data.serviceFile("hello", "tokens.json"), []byte("garbage"), 0o600))
		w.start()
		w.gone()
		w.asked(w.s.retire(1, "local"))
		w.retiresOpen()
		w.stop()
		_, err = w.data.restoreNamed("services/hello/tokens.json", w.runningNow, w.s.now())
		must(t, err)
		w.start()
		w.until("retired", func(r *record) bool { return r.Retired.Done && len(r.Retired.Remains) == 0 })
		w.expectRuns()
		w.chain()
	})
}

// The revision of a first candidate that failed is damaged: the retirement says that it is in the way, and the
// service stays open.
func TestRetireWithADamagedRevision(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.expect(w.await(w.submit(w.push("bad", app{readyAfter: -1})).ID), hasFailed, "no_rollback_target")
		must(t, os.WriteFile(w.data.serviceFile("hello", "revisions", "1.json"), nil, 0o600))
		w.gone()
		w.asked(w.s.retire(0, "local"))
		w.retiresOpen()
		must(t, os.Remove(w.data.serviceFile("hello", "revisions", "1.json")))
		w.until("retired", func(r *record) bool { return r.Retired.Done })
	})
}
