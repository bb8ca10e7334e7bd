package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// Killed between the intent of a start and the start, after the instance before it had ended as failed
// (it ignored SIGTERM): a unit that is failed was not started for that, and the start is made.
func TestKilledBeforeAStartAfterAStopThatEndedFailed(t *testing.T) {
	for _, call := range []string{"reset-failed hello.service", "start hello.service"} {
		t.Run("candidate, "+call, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				image := w.push("stubborn", app{ignoresTerm: true})
				w.expect(w.await(w.submit(image).ID), promoted, "")
				w.killAt(call, 1, false)
				op := w.submit(w.push("v2", app{}))
				w.revive()
				w.expect(w.await(op.ID), promoted, "")
			})
		})
		t.Run("target, "+call, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				first := w.promote("v1")
				w.killAt(call, 2, false)
				op := w.submit(w.push("stubborn", app{ignoresTerm: true, readyAfter: -1}))
				w.revive()
				w.expect(w.await(op.ID), rolledBack, "startup_deadline")
				time.Sleep(time.Second)
				w.expectRuns(first.Candidate.Image)
			})
		})
	}
}

// The append of an acceptance's events fails after its commit: the operation goes on from the disk, with
// its event in the log.
func TestAppendFailsAtAcceptance(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		failures := 2 // once more with the reserve's help
		w.set(func() {
			w.spoil = func(step, path string) error {
				if step == "append" && failures > 0 {
					failures--
					return errors.New("input/output error")
				}
				return nil
			}
		})
		_, _, err := w.s.submit(w.request(w.push("v2", app{}), "k"))
		var e *apiError
		if !errors.As(err, &e) || e.Code != "state_unavailable" {
			t.Fatalf("answered %v", err)
		}
		time.Sleep(2 * time.Minute)
		w.expect(w.s.op(), promoted, "")
		want := []string{"deploy", "activate", "promote", "deploy", "activate", "promote"}
		if got := w.eventTypes(); !slices.Equal(got, want) {
			t.Errorf("events %v, want %v", got, want)
		}
	})
}

// What is found written by a predecessor that was killed before the sync of its directory is synced
// before anything relies on it.
func TestFoundRecordsAreMadeDurable(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		op := w.promote("v1")
		w.restart()
		time.Sleep(time.Second)
		var synced []string
		w.set(func() {
			w.spoil = func(step, path string) error {
				if step == "syncdir" {
					synced = append(synced, path)
				}
				return nil
			}
		})
		must(t, w.data.archive(w.en.Service, w.s.op()))
		rev, err := w.data.revision(w.en.Service, op.Candidate.Generation)
		must(t, err)
		must(t, w.data.syncRevision(rev))
		must(t, removeFile(filepath.Join(w.s.images(), "nothing")))
		w.set(func() { w.spoil = nil })
		for _, dir := range []string{"operations", "keys", "revisions", "images"} {
			if !slices.Contains(synced, w.data.serviceFile(w.en.Service, dir)) {
				t.Errorf("%s is not synced: %v", dir, synced)
			}
		}
	})
}

// A boot with a wall clock that went back, in each state that has a deadline: it is passed, also after
// further commits, and the operation ends at once.
func TestWallClockWentBackInEveryState(t *testing.T) {
	for _, st := range []state{preparing, activating, inProbation, promoting, rollingBack} {
		t.Run(string(st), func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				first := w.promote("v1")
				a := app{readyAfter: time.Second}
				switch st {
				case rollingBack:
					a.exitAfter = time.Second
				case promoting: // its last look takes long enough for the kill to come first
					a.slow = 500 * time.Millisecond
				}
				w.set(func() {
					w.spoil = func(step, path string) error { // at the commit after the state's own
						w.mu.Lock()
						defer w.mu.Unlock()
						if step == "keep" && w.last.Operation.State == st {
							return w.kill()
						}
						return nil
					}
				})
				op := w.submit(w.push("v2", a))
				<-w.died
				w.stop()
				w.set(func() { w.spoil = nil })
				w.h.reboot()
				w.set(func() { w.h.kernelBoot, w.h.wallOffset = "boot-2", -24*time.Hour })
				w.start()
				begun := time.Now()
				op = w.await(op.ID)
				if d := time.Since(begun); d > time.Minute || op.State == promoted {
					t.Errorf("%s after %s", op.State, d)
				}
				time.Sleep(time.Minute)
				w.expectRuns(first.Candidate.Image)
			})
		})
	}
}

// The Quadlet directory refuses every write: that is the host's failure, and the operation ends.
func TestQuadletDirectoryRefusesWrites(t *testing.T) {
	for _, first := range []bool{true, false} {
		t.Run(fmt.Sprintf("first=%v", first), func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				if !first {
					w.promote("v1")
				}
				op := w.submit(w.push("v2", app{readyAfter: -1}))
				if !first {
					w.awaitState(op.ID, inProbation)
				}
				w.set(func() {
					w.spoil = func(step, path string) error {
						if strings.HasPrefix(path, w.h.quadlets) && step != "syncdir" {
							return errors.New("read-only file system")
						}
						return nil
					}
				})
				code := "no_rollback_target"
				if !first {
					code = "rollback_failed"
				}
				w.expect(w.await(op.ID), hasFailed, code)
				if w.s.usable() != nil {
					t.Error("the records are said to be unusable")
				}
				w.set(func() { w.spoil = nil })
				w.expect(w.await(w.submit(w.push("v3", app{})).ID), promoted, "")
			})
		})
	}
}

// Restarts by hand while Toad was away, and Podman does not answer at first: they are not missed.
func TestRestartsWhileToadIsDownAndPodmanHangs(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		op := w.submit(w.push("v2", app{readyAfter: time.Second}))
		w.awaitThat(op.ID, func(op *operation) bool { return op.FirstReady != nil })
		w.stop()
		for range 3 {
			w.h.restartByHand("hello.service")
			time.Sleep(2 * time.Second)
		}
		w.set(func() { w.h.podmanHangs = true })
		w.start()
		time.Sleep(5 * time.Second)
		w.set(func() { w.h.podmanHangs = false })
		w.expect(w.await(op.ID), rolledBack, "restart_budget")
	})
}

// Toad was away from the begin of the activation to past the deadline: the old instance is not stopped
// for nothing.
func TestDeadlinePassedBeforeTheStop(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		w.set(func() {
			w.spoil = func(step, path string) error {
				w.mu.Lock()
				defer w.mu.Unlock()
				if o := w.last.Operation; step == "keep" && o.State == activating && o.Step == "" {
					return w.kill()
				}
				return nil
			}
			w.h.mutations = nil
		})
		op := w.submit(w.push("v2", app{}))
		<-w.died
		w.stop()
		w.set(func() { w.spoil = nil })
		time.Sleep(time.Hour)
		w.start()
		w.expect(w.await(op.ID), hasFailed, "startup_deadline")
		w.expectRuns(first.Candidate.Image)
		if slices.Contains(w.h.mutations, "stop hello.service") {
			t.Error("the old instance was stopped")
		}
	})
}

// Killed between the intent of the start after a boot and the start: it is made.
func TestKilledBeforeTheStartAfterABoot(t *testing.T) {
	for _, applied := range []bool{false, true} {
		t.Run(fmt.Sprintf("applied=%v", applied), func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.promote("v1")
				op := w.submit(w.push("v2", app{readyAfter: time.Second}))
				w.awaitThat(op.ID, func(op *operation) bool { return op.FirstReady != nil })
				w.stop()
				w.h.reboot()
				w.killAt("start hello.service", 1, applied)
				w.start()
				w.revive()
				op = w.await(op.ID)
				w.expect(op, promoted, "")
				if op.Restarts.Count != 0 {
					t.Errorf("%d restarts", op.Restarts.Count)
				}
			})
		})
	}
}

// A Podman that takes an image and never answers holds up what is no rollout for a bounded time, and has not
// said that the image is bad.
func TestLoadThatNeverEnds(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		time.Sleep(time.Minute)
		w.set(func() { w.h.images, w.h.loadHangs = map[string]string{}, true })
		begun := time.Now()
		_, err := w.s.ensureImage(t.Context(), w.s.rec.Load().Current.reference)
		if d := time.Since(begun); err == nil || isCode(err, "load_failed") || d != loadTime {
			t.Errorf("after %s: %v", d, err)
		}
		w.set(func() { w.h.loadHangs = false })
		if _, err := w.s.ensureImage(t.Context(), w.s.rec.Load().Current.reference); err != nil {
			t.Error(err)
		}
	})
}

// The manager does not answer for a moment in the middle of an activation and of a rollback.
func TestHostDoesNotAnswerForAMoment(t *testing.T) {
	for _, kill := range []bool{false, true} {
		t.Run(fmt.Sprintf("killed=%v", kill), func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				first := w.promote("v1")
				hang := func() {
					w.set(func() { w.h.managerHangs = true })
					time.AfterFunc(15*time.Second, func() { w.set(func() { w.h.managerHangs = false }) })
				}
				hung := map[state]bool{}
				w.onMutation(func(name string) (bool, error) {
					st := w.s.op().State
					if name == "reload" && !hung[st] {
						hung[st] = true
						hang()
					}
					if name == "start hello.service" && kill && st == rollingBack {
						hang()
						return true, w.kill()
					}
					return true, nil
				})
				op := w.submit(w.push("v2", app{exitAfter: time.Second}))
				if kill {
					w.revive()
				}
				w.expect(w.await(op.ID), rolledBack, "restart_budget")
				w.expectRuns(first.Candidate.Image)
			})
		})
	}
}

// bootBeforeInstalled deploys, kills Toad right after the commit of the promotion, and boots the host.
func (w *world) bootBeforeInstalled(image string) {
	w.t.Helper()
	w.set(func() {
		w.spoil = func(step, path string) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.last != nil && w.last.Operation.State == promoted && step == "append" {
				return w.kill()
			}
			return nil
		}
	})
	w.submit(image)
	<-w.died
	w.stop()
	w.h.reboot()
}

// A boot between the promotion and its unit, and a submission that fails before the promotion could be
// finished: the current revision is started all the same.
func TestInstallAfterABootAndAFailedOperation(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		image := w.push("v1", app{})
		w.bootBeforeInstalled(image)
		w.set(func() {
			w.h.managerHangs = true // the promotion cannot be finished yet
			w.spoil = nil
			w.en.FetchDeadline = duration(5 * time.Second)
			w.h.registryDown = true
		})
		w.start()
		op := w.submit(w.push("v2", app{}))
		if op = w.await(op.ID); op.State != hasFailed {
			t.Fatalf("it ended %s", op.State)
		}
		w.set(func() { w.h.managerHangs = false })
		w.until("installed", func(r *record) bool { return r.Installed })
		time.Sleep(time.Second)
		w.expectRuns(image)
	})
}

// A submission does not wait for the slow cycle's own repairs.
func TestRetentionGivesWayToASubmission(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		w.promote("v2")
		var hung atomic.Bool
		w.set(func() {
			w.h.onFetch = func(ctx context.Context, image string) error {
				if image == first.Candidate.Image && hung.CompareAndSwap(false, true) {
					<-ctx.Done()
					return failed("fetch_failed", ctx.Err(), digestOf(image), "no answer")
				}
				return nil
			}
		})
		blob := filepath.Join(w.s.images(), "blobs", "sha256", strings.TrimPrefix(first.Candidate.ConfigID, "sha256:"))
		must(t, os.Remove(blob))
		end := time.Now().Add(2 * retentionInterval)
		for !hung.Load() && time.Now().Before(end) {
			time.Sleep(time.Second)
		}
		begun := time.Now()
		w.expect(w.await(w.submit(w.push("v3", app{})).ID), promoted, "")
		if d := time.Since(begun); d > 35*time.Second {
			t.Errorf("promoted after %s", d)
		}
		if slices.Contains(w.eventTypes(), "retention-lost") {
			t.Error("what was not asked to its end is told as lost")
		}
	})
}

func TestCountingRestarts(t *testing.T) {
	at := func(invocation, active, sub string, n uint32) unitStatus {
		return unitStatus{InvocationID: invocation, ActiveState: active, SubState: sub, NRestarts: n}
	}
	running := func(invocation string, n uint32) unitStatus { return at(invocation, "active", "running", n) }
	queued := func(invocation string, n uint32) unitStatus {
		return at(invocation, "activating", "auto-restart-queued", n)
	}
	for _, tt := range []struct {
		name string
		seen []unitStatus
		want int
	}{
		{"none", []unitStatus{running("a", 0), running("a", 0)}, 0},
		{"scheduled and run", []unitStatus{running("a", 0), queued("a", 1), running("b", 1)}, 1},
		{"only its end is seen", []unitStatus{running("a", 0), running("b", 1)}, 1},
		{"by hand", []unitStatus{running("a", 0), running("b", 0)}, 1},
		{"by hand, inactive in between", []unitStatus{running("a", 0), at("a", "inactive", "dead", 0), at("b", "inactive", "dead", 0), running("b", 0)}, 1},
		{"scheduled, then by hand", []unitStatus{running("a", 0), queued("a", 1), running("b", 1), running("c", 0)}, 2},
		{"the new invocation under the old state", []unitStatus{running("a", 0), queued("a", 1), queued("b", 1), running("b", 1), running("c", 0)}, 2},
		{"a look overtaken by a restart by hand", []unitStatus{running("a", 0), running("b", 0), running("a", 0), running("b", 0)}, 1},
		{"a look overtaken by a scheduled restart", []unitStatus{running("a", 0), queued("a", 1), running("a", 0), running("b", 1)}, 1},
		{"a look overtaken by a whole restart", []unitStatus{running("a", 0), queued("a", 1), running("b", 1), running("a", 0), running("b", 1)}, 1},
		{"counter reset", []unitStatus{running("a", 3), running("a", 0), queued("a", 1), running("b", 1)}, 4},
		{"the old instance's own end", []unitStatus{running("old", 0), running("a", 0)}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := restarts{Before: "old"}
			for _, u := range tt.seen {
				r = r.add(u)
			}
			if r.Count != tt.want {
				t.Errorf("%d restarts, want %d", r.Count, tt.want)
			}
		})
	}
}

// The wall clock goes back: what Podman's log has of earlier instances is no restart of this one.
func TestEarlierStartsAreNoRestarts(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		w.promote("v2")
		w.set(func() { w.h.wallOffset = -time.Hour })
		op := w.await(w.submit(w.push("v3", app{})).ID)
		w.expect(op, promoted, "")
		if op.Restarts.Count != 0 {
			t.Errorf("%d restarts", op.Restarts.Count)
		}
	})
}

// A container that is replaced while it is being asked: the answer does not count, the log says so, and
// the window begins again.
func TestReplacedWhileAsked(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(h *fakeHost)
		lost   bool // the window
	}{
		"restarted by hand": {func(h *fakeHost) { h.restartByHand("hello.service") }, true},
		"killed":            {func(h *fakeHost) { h.kill("hello.service") }, true},
		"something else": {func(h *fakeHost) { // a signal, and the same instance
			h.mu.Lock()
			defer h.mu.Unlock()
			u := h.unit("hello.service")
			h.set(u, "reloading", "reload")
			h.set(u, "active", "running")
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.set(func() { w.en.Probation.RestartBudget = 3 })
				op := w.submit(w.push("slow", app{slow: 900 * time.Millisecond, readyAfter: time.Second}))
				w.awaitThat(op.ID, func(op *operation) bool { return op.FirstReady != nil })
				time.Sleep(10500 * time.Millisecond) // in the middle of an answer
				said := len(w.logLines(op.ID))
				tt.change(w.h)
				changed := time.Now()
				time.Sleep(100 * time.Millisecond)
				code := "not_ready"
				if tt.lost {
					code = "window_reset"
				}
				i := slices.IndexFunc(w.logLines(op.ID)[said:], func(l logLine) bool {
					return l.Code == code && strings.HasSuffix(l.Text, changedWhileAsked)
				})
				if i < 0 {
					t.Errorf("no line %s: %v", code, w.logLines(op.ID)[said:])
				}
				w.expect(w.await(op.ID), promoted, "")
				if d := time.Since(changed); (d >= 30*time.Second) != tt.lost {
					t.Errorf("promoted %s after the change", d)
				}
			})
		})
	}
}

func (w *world) logLines(id string) []logLine {
	lines, _ := readLog(w.data.serviceFile(w.en.Service, "operations", id+".log"))
	return lines
}

// The unit is between two starts when a deployment looks for foreign containers: its own are none, and
// one that is foreign is seen all the same (S3).
func TestForeignContainerBetweenTwoStarts(t *testing.T) {
	for _, foreign := range []bool{false, true} {
		t.Run(fmt.Sprintf("foreign=%v", foreign), func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				first := w.promote("v1")
				id := strings.Repeat("f", 64)
				w.set(func() {
					w.h.apps[first.Candidate.digest()].restartAfter = time.Hour
					w.h.mutations = nil
				})
				w.h.kill("hello.service")
				w.set(func() {
					c := &hostContainer{app: &app{}, container: container{ID: id, Name: "hello", Status: "created", Unit: "hello.service"}}
					if foreign {
						c.Name, c.Unit, c.Labels = "hello2", "", map[string]string{"toad.service": "hello"}
					}
					w.h.containers[id] = c
				})
				op := w.submit(w.push("v2", app{}))
				if !foreign { // it has come that far
					w.awaitState(op.ID, activating)
					w.set(func() { delete(w.h.containers, id) })
					w.expect(w.await(op.ID), promoted, "")
					return
				}
				w.expect(w.await(op.ID), hasFailed, "foreign_container")
				if slices.Contains(w.h.mutations, "stop hello.service") || w.s.rec.Load().Held != nil {
					t.Errorf("something was stopped or held: %v", w.h.mutations)
				}
				w.set(func() { delete(w.h.containers, id) })
			})
		})
	}
}

// restartsBetween restarts a unit between the list of its containers and the look at it.
type restartsBetween struct {
	policed
	n int
}

func (r *restartsBetween) Containers(ctx context.Context, service, unit, name string) ([]container, error) {
	list, err := r.policed.Containers(ctx, service, unit, name)
	if r.n > 0 {
		r.n--
		r.restartByHand(unit)
		time.Sleep(400 * time.Millisecond)
	}
	return list, err
}

// The unit restarts while foreign containers are looked for: what was its own is not called foreign.
func TestRestartWhileForeignContainersAreLookedFor(t *testing.T) {
	for n := range 5 {
		inWorld(t, func(t *testing.T, w *world) {
			op := w.promote("v1")
			rev, err := w.data.revision("hello", op.Candidate.Generation)
			must(t, err)
			w.stop()
			looks := &restartsBetween{policed{w.h, w}, n}
			w.s.host.containers = looks
			must(t, w.s.commit(func(r *record) error { r.Containers = nil; return nil }))
			if err := w.s.foreign(t.Context(), rev); err != nil {
				t.Errorf("%d restarts: %v", n, err)
			}
			w.set(func() { // one with its label that it does not run
				id := strings.Repeat("f", 64)
				w.h.containers[id] = &hostContainer{app: &app{}, container: container{ID: id, Name: "hello2", Status: "running", ConmonPID: 1, Unit: "hello.service"}}
			})
			looks.n = min(n, 2)
			if err := w.s.foreign(t.Context(), rev); !isCode(err, "foreign_container") {
				t.Errorf("%d restarts: %v", n, err)
			}
			w.start()
		})
	}
}

// Podman does not answer between the stop and the start: the image is asked for again, within the
// deadline, and nothing has failed to load.
func TestPodmanHangsBeforeTheStart(t *testing.T) {
	for _, tt := range []struct {
		name  string
		hangs time.Duration
		state state
		code  string
	}{
		{"for a moment", 25 * time.Second, promoted, ""},
		{"past the deadline", 70 * time.Second, rolledBack, "startup_deadline"},
	} {
		for _, at := range []string{"look", "load"} {
			t.Run(at+", "+tt.name, func(t *testing.T) {
				inWorld(t, func(t *testing.T, w *world) {
					w.promote("v1")
					w.set(func() {
						w.spoil = func(step, path string) error { // at the commit of the step
							w.mu.Lock()
							defer w.mu.Unlock()
							if step == "syncdir" && w.last.Operation.Step == stepWrite && w.last.Operation.State == activating && !w.h.hung {
								w.set(func() {
									w.h.hung = true
									if at == "load" {
										clear(w.h.images)
										w.h.loadsRefused = 1 << 30
									} else {
										w.h.podmanHangs = true
									}
								})
								time.AfterFunc(tt.hangs, func() { w.set(func() { w.h.podmanHangs, w.h.loadsRefused = false, 0 }) })
							}
							return nil
						}
					})
					op := w.await(w.submit(w.push("v2", app{})).ID)
					w.expect(op, tt.state, tt.code)
					if codes := w.logCodes(op.ID); !slices.Contains(codes, "host_not_answering") {
						t.Errorf("log %v", codes)
					}
				})
			})
		}
	}
}

// A load that Podman refuses has failed, after three tries; before the stop it touches nothing.
func TestLoadRefused(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		loads := 0
		w.onMutation(func(name string) (bool, error) {
			if name == "load image" {
				loads++
				return false, errors.New("no space left on device")
			}
			return true, nil
		})
		w.expect(w.await(w.submit(w.push("v2", app{})).ID), hasFailed, "load_failed")
		if loads != 3 {
			t.Errorf("%d loads", loads)
		}
		w.expectRuns(first.Candidate.Image)
	})
}

// A service's own unit vanishes at its write: the file before it is put back.
func TestUnitVanishesAtItsWrite(t *testing.T) {
	t.Run("candidate", func(t *testing.T) {
		inWorld(t, func(t *testing.T, w *world) {
			first := w.promote("v1")
			image := w.push("v2", app{})
			var found []string // in the unit's file, at each reload
			w.onMutation(func(name string) (bool, error) {
				if name == "reload" {
					found = append(found, lineOf(w.unitFile(), "Image="))
					w.set(func() {
						w.h.generator = func(_ string, text []byte) bool { return !strings.Contains(string(text), image) }
					})
				}
				return true, nil
			})
			w.expect(w.await(w.submit(image).ID), rolledBack, "unit_invalid")
			if len(found) < 2 || found[0] != image || found[1] != first.Candidate.Image {
				t.Errorf("the unit's file at each reload: %v", found)
			}
			w.expectRuns(first.Candidate.Image)
		})
	})
	t.Run("the one before cannot be put back", func(t *testing.T) {
		inWorld(t, func(t *testing.T, w *world) {
			first := w.promote("v1")
			image := w.push("v2", app{})
			closed := false
			w.onMutation(func(name string) (bool, error) {
				if name == "reload" && lineOf(w.unitFile(), "Image=") == image {
					w.set(func() {
						w.h.generator = func(_ string, text []byte) bool { return !strings.Contains(string(text), image) }
						w.spoil = func(step, path string) error {
							closed = closed || w.s.rec.Load().Operation.State == rollingBack
							if !closed && strings.HasPrefix(path, w.h.quadlets) {
								return errors.New("read-only file system")
							}
							return nil
						}
					})
				}
				return true, nil
			})
			op := w.await(w.submit(image).ID)
			w.expect(op, rolledBack, "interrupted")
			if slices.Contains(w.logCodes(op.ID), "resumed") {
				t.Error("the records were taken to be unknown")
			}
			w.expectRuns(first.Candidate.Image)
		})
	})
	t.Run("promoted", func(t *testing.T) {
		inWorld(t, func(t *testing.T, w *world) {
			image := w.push("v1", app{})
			op := w.submit(image)
			w.awaitState(op.ID, inProbation)
			w.set(func() {
				w.h.generator = func(_ string, text []byte) bool { return !strings.Contains(string(text), "[Install]") }
			})
			w.expect(w.await(op.ID), promoted, "")
			time.Sleep(time.Second)
			if st, err := w.h.Unit(t.Context(), "hello.service"); err != nil || st.LoadState != "loaded" || strings.Contains(w.unitFile(), "[Install]") {
				t.Errorf("%v: the candidate's unit is not back: %s\n%s", err, st.LoadState, w.unitFile())
			}
			w.expectRuns(image)
			w.set(func() { w.h.generator = nil })
			w.until("installed", func(r *record) bool { return r.Installed })
			if !strings.Contains(w.unitFile(), "[Install]") {
				t.Error("the promoted unit does not start at boot")
			}
		})
	})
}

// A large image from a slow registry: its time is the fetch deadline's only, and the old instance serves
// meanwhile (R4).
func TestSlowRegistry(t *testing.T) {
	for _, tt := range []struct {
		name  string
		takes time.Duration
		state state
		code  string
	}{
		{"longer than every deadline of the rollout", 8 * time.Minute, promoted, ""},
		{"longer than its own", time.Hour, hasFailed, "fetch_failed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				first := w.promote("v1")
				before := w.h.unit("hello.service").invocation
				w.set(func() {
					w.h.onFetch = func(ctx context.Context, image string) error {
						select {
						case <-time.After(tt.takes):
							return nil
						case <-ctx.Done():
							return failed("fetch_failed", ctx.Err(), digestOf(image), "no answer")
						}
					}
				})
				begun := time.Now()
				op := w.submit(w.push("v2", app{}))
				time.Sleep(min(tt.takes, time.Duration(w.en.FetchDeadline)) - time.Second)
				w.expectRuns(first.Candidate.Image)
				if now := w.h.unit("hello.service").invocation; now != before || w.s.op().State != preparing {
					t.Errorf("state %s; the old instance was touched: invocation %s, then %s", w.s.op().State, before, now)
				}
				w.expect(w.await(op.ID), tt.state, tt.code)
				if d := time.Since(begun); tt.state == hasFailed && d > time.Duration(w.en.FetchDeadline)+time.Second {
					t.Errorf("ended after %s", d)
				}
			})
		})
	}
}

// The host is booted during a rollback, the target comes up with it, and Podman does not answer at first: who
// cannot be asked yet is not stopped for it.
func TestTargetIsLeftAloneWhilePodmanIsSilent(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		w.set(func() { w.h.apps[first.Candidate.digest()].readyAfter = 20 * time.Second })
		op := w.submit(w.push("v2", app{exitAfter: time.Second}))
		w.awaitThat(op.ID, func(op *operation) bool { return op.Step == stepVerify })
		w.stop()
		w.h.reboot()
		time.Sleep(time.Second)
		w.set(func() { w.h.podmanHangs, w.h.mutations = true, nil })
		w.start()
		time.Sleep(15 * time.Second)
		w.set(func() { w.h.podmanHangs = false })
		w.expect(w.await(op.ID), rolledBack, "restart_budget")
		if slices.Contains(w.h.mutations, "stop hello.service") {
			t.Errorf("the target was stopped: %v", w.h.mutations)
		}
		w.expectRuns(first.Candidate.Image)
	})
}

// The archived operation of the current revision is damaged, and a later one ended badly: that is fsck's to
// report, and closes nothing.
func TestDamagedArchiveClosesNothing(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		time.Sleep(time.Minute)
		w.set(func() {
			w.h.apps[first.Candidate.digest()].readyAfter = -1
			w.spoil = func(step, path string) error { // what is between rollouts cannot be finished yet
				if r := w.s.rec.Load(); r != nil && r.active() == nil && strings.HasPrefix(path, w.h.quadlets) {
					return errors.New("read-only file system")
				}
				return nil
			}
		})
		w.expect(w.await(w.submit(w.push("v2", app{exitAfter: time.Second})).ID), hasFailed, "rollback_failed")
		must(t, os.WriteFile(w.data.serviceFile("hello", "operations", first.ID+".json"), []byte("garbage"), 0o600))
		w.set(func() { w.h.registryDown = true })
		w.expect(w.await(w.submit(w.push("v3", app{})).ID), hasFailed, "fetch_failed")
		w.set(func() { w.spoil, w.h.registryDown = nil, false })
		w.until("installed", func(r *record) bool { return r.Installed })
		if err := w.s.usable(); err != nil {
			t.Errorf("closed: %v", errors.Unwrap(err))
		}
		w.expect(w.await(w.submit(w.push("v4", app{})).ID), promoted, "")
	})
}

// A hold that ends without a revision to go back to installs nothing.
func TestNothingIsInstalledWithoutARevision(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		image := w.push("stuck", app{readyAfter: -1, unkillable: true})
		w.expect(w.await(w.submit(image).ID), hasFailed, "termination_unconfirmed")
		w.set(func() { w.h.apps[digestOf(image)].unkillable = false })
		w.h.reap("hello.service")
		w.until("not held", func(r *record) bool { return r.Held == nil })
		if v := w.s.view(true); v.Installed || v.Current != nil {
			t.Errorf("installed %v, current %+v", v.Installed, v.Current)
		}
	})
}

// During a rollout health is what was last seen: not that of the instance that was stopped.
func TestHealthDuringARollout(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		w.health("running")
		op := w.submit(w.push("v2", app{readyAfter: 20 * time.Second, readyFor: 15 * time.Second}))
		at := func(d time.Duration) wireHealth {
			time.Sleep(d)
			h := w.s.view(true).Health
			if h.ObservedAt == nil || time.Since(time.Time(*h.ObservedAt)) > 5*time.Second {
				t.Errorf("observed at %v", h.ObservedAt)
			}
			return h
		}
		w.awaitState(op.ID, inProbation)
		if h := at(10 * time.Second); h.State != "running" || h.Ready || h.MatchesCurrent || h.Digest != "" {
			t.Errorf("not ready: %+v", h)
		}
		if h := at(15 * time.Second); h.State != "running" || !h.Ready || h.MatchesCurrent || h.Digest != op.Candidate.digest() {
			t.Errorf("ready: %+v", h)
		}
		if h := at(15 * time.Second); h.State != "running" || h.Ready || h.MatchesCurrent {
			t.Errorf("not ready any more: %+v", h)
		}
		w.set(func() { w.h.apps[first.Candidate.digest()].readyAfter = 10 * time.Second })
		w.awaitThat(op.ID, func(op *operation) bool { return op.Step == stepVerify })
		if h := at(5 * time.Second); h.State != "running" || h.Ready || h.MatchesCurrent {
			t.Errorf("rolling back: %+v", h)
		}
		w.expect(w.await(op.ID), rolledBack, "rollout_deadline")
		if h := at(0); !h.Ready || !h.MatchesCurrent || h.Digest != first.Candidate.digest() {
			t.Errorf("rolled back: %+v", h)
		}
	})
}

// A service was told to be unhealthy, and an operation that never touched it came in between: that it is healthy
// again is told all the same.
func TestHealthyIsToldAfterAFailedOperation(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		first := w.promote("v1")
		time.Sleep(time.Minute)
		w.set(func() { w.h.apps[first.Candidate.digest()].readyFor = time.Second })
		time.Sleep(2 * time.Minute)
		w.set(func() { w.h.registryDown = true })
		w.expect(w.await(w.submit(w.push("v2", app{})).ID), hasFailed, "fetch_failed")
		w.set(func() { w.h.apps[first.Candidate.digest()].readyFor = 0 })
		time.Sleep(5 * time.Minute)
		want := []string{"deploy", "activate", "promote", "unhealthy", "deploy", "failed", "healthy"}
		if got := w.eventTypes(); !slices.Equal(got, want) {
			t.Errorf("events %v, want %v", got, want)
		}
	})
}

// What was told before a restart of Toad, that a service is not healthy and that its rollback is lost, is taken
// back after it.
func TestRecoveryIsToldAfterARestart(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		op := w.promote("v2")
		time.Sleep(time.Minute)
		w.set(func() {
			w.h.apps[op.Candidate.digest()].readyFor = time.Second
			w.h.networks["systemd-apps"] = false
		})
		time.Sleep(2 * retentionInterval)
		w.restart()
		time.Sleep(time.Minute)
		if got := w.eventTypes(); slices.Contains(got, "healthy") || slices.Contains(got, "retention-restored") {
			t.Errorf("nothing recovered: %v", got)
		}
		w.stop()
		w.set(func() {
			w.h.apps[op.Candidate.digest()].readyFor = 0
			w.h.networks["systemd-apps"] = true
		})
		w.start()
		time.Sleep(2 * retentionInterval)
		w.restart()
		time.Sleep(2 * retentionInterval)
		count := map[string]int{}
		for _, typ := range w.eventTypes() {
			count[typ]++
		}
		if count["unhealthy"] != 1 || count["healthy"] != 1 || count["retention-lost"] == 0 || count["retention-restored"] != 1 {
			t.Errorf("%v", w.eventTypes())
		}
	})
}

// Podman does not answer: what was missing is not there again for that, and what was never asked is not ready.
func TestSilentPodmanRestoresNothing(t *testing.T) {
	for _, restarted := range []bool{false, true} {
		inWorld(t, func(t *testing.T, w *world) {
			w.promote("v1")
			w.promote("v2")
			time.Sleep(time.Minute)
			w.set(func() { w.h.networks["systemd-apps"] = false })
			time.Sleep(2 * retentionInterval)
			w.set(func() { w.h.podmanHangs = true })
			if restarted {
				w.restart()
			}
			time.Sleep(2 * retentionInterval)
			if v := w.s.view(true); v.Rollback.Ready {
				t.Errorf("restarted %v: ready", restarted)
			}
			w.set(func() { w.h.podmanHangs, w.h.networks["systemd-apps"] = false, true })
			got := w.eventTypes()
			if slices.Contains(got, "retention-restored") || !slices.Contains(got, "retention-lost") {
				t.Errorf("restarted %v: events %v", restarted, got)
			}
			time.Sleep(2 * retentionInterval)
			if v := w.s.view(true); !v.Rollback.Ready {
				t.Errorf("restarted %v: not ready", restarted)
			}
		})
	}
}

// Right after a promotion nobody has looked yet whether the revision that is retained now could be restored.
func TestReadinessIsOfTheRetainedRevision(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		w.promote("v2")
		time.Sleep(10 * time.Minute)
		if v := w.s.view(true); !v.Rollback.Ready {
			t.Error("the first is not ready")
		}
		op := w.submit(w.push("v3", app{readyAfter: time.Second}))
		w.awaitState(op.ID, inProbation)
		must(t, os.Remove(filepath.Join(w.s.images(), "blobs", "sha256", strings.TrimPrefix(w.s.rec.Load().Current.ConfigID, "sha256:"))))
		looked := false
		w.onMutation(func(name string) (bool, error) {
			if w.s.op().State == promoted && name == "reload" {
				looked = true
				if v := w.s.view(true); v.Rollback.Generation != 2 || v.Rollback.Ready {
					t.Errorf("ready: %+v", v.Rollback)
				}
			}
			return true, nil
		})
		w.set(func() { w.h.registryDown = true })
		w.expect(w.await(op.ID), promoted, "")
		time.Sleep(time.Minute)
		if v := w.s.view(true); !looked || v.Rollback.Ready || len(v.Rollback.Problems) != 1 {
			t.Errorf("looked %v: %+v", looked, v.Rollback)
		}
	})
}

// The promotion is being finished after a boot, and Podman takes the image and never answers: an operation that
// is accepted meanwhile does not wait for it.
func TestFinishingAPromotionGivesWayToASubmission(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		image := w.push("v1", app{})
		w.bootBeforeInstalled(image)
		w.set(func() { w.spoil, w.h.images, w.h.loadHangs = nil, map[string]string{}, true })
		w.start()
		time.Sleep(5 * time.Second)
		w.set(func() { w.h.loadHangs = false }) // for whoever asks now
		begun := time.Now()
		op := w.await(w.submit(w.push("v2", app{readyAfter: time.Second})).ID)
		w.expect(op, promoted, "")
		if d := time.Since(begun); d > time.Minute {
			t.Errorf("promoted after %s", d)
		}
	})
}

// While the old instance is being stopped it is not said to be ready.
func TestHealthDuringAStop(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.expect(w.await(w.submit(w.push("v1", app{ignoresTerm: true})).ID), promoted, "")
		w.until2("ready", func() bool { return w.s.view(true).Health.Ready })
		op := w.submit(w.push("v2", app{readyAfter: time.Second}))
		w.awaitThat(op.ID, func(op *operation) bool { return op.Step == stepStop })
		time.Sleep(2 * time.Second)
		if h := w.s.view(true).Health; h.Ready || h.MatchesCurrent {
			t.Errorf("health %+v", h)
		}
		w.expect(w.await(op.ID), promoted, "")
	})
}
