package main

import (
	"fmt"
	"testing"
	"time"
)

// What the wall clock may do: no step of it and no date moves a deadline, promotes without a whole window
// that was watched, or keeps a rollout from its end. The world's invariants hold all the while, I2 and I9
// among them.

// setClock sets the wall clock of the host.
func (w *world) setClock(to time.Time) { w.set(func() { w.h.wallOffset = time.Until(to) }) }

// stepClock moves it by so much.
func (w *world) stepClock(by time.Duration) { w.set(func() { w.h.wallOffset += by }) }

var (
	inTheSeventies = time.Date(1970, 1, 1, 0, 0, 7, 0, time.UTC) // a board without a battery
	farAway        = time.Date(2100, 2, 28, 12, 0, 0, 0, time.UTC)
)

// clockLives are rollouts that stay in a state for a while.
var clockLives = []struct {
	name  string
	in    state // when the clock steps
	old   app
	app   app
	after time.Duration // in that state
	end   state
	code  string
}{
	{"good", inProbation, app{}, app{readyAfter: time.Second}, 10 * time.Second, promoted, ""},
	{"stopping the old", activating, app{ignoresTerm: true}, app{readyAfter: time.Second}, time.Second, promoted, ""},
	{"never ready", inProbation, app{}, app{readyAfter: -1}, 10 * time.Second, rolledBack, "startup_deadline"},
	{"never for long enough", inProbation, app{}, app{readyAfter: time.Second, readyFor: 20 * time.Second}, 30 * time.Second, rolledBack, "rollout_deadline"},
	{"stopping the candidate", rollingBack, app{}, app{readyAfter: -1, ignoresTerm: true}, time.Second, rolledBack, "startup_deadline"},
	{"rollback without an end", rollingBack, app{readyAfter: time.Second}, app{exitAfter: time.Second}, 20 * time.Second, hasFailed, "rollback_failed"},
}

// live begins such a rollout and waits until the clock is to step.
func (w *world) live(i int) (op *operation, begun time.Time) {
	w.t.Helper()
	l := clockLives[i]
	w.expect(w.await(w.submit(w.push("v1", l.old)).ID), promoted, "")
	w.until("installed", func(r *record) bool { return r.Installed })
	if l.code == "rollback_failed" {
		w.set(func() { w.h.apps[w.s.rec.Load().Current.digest()].readyAfter = -1 })
	}
	begun = time.Now()
	op = w.awaitState(w.submit(w.push("v2", l.app)).ID, l.in)
	if op.State != l.in {
		w.t.Fatalf("it is %s, want %s", op.State, l.in)
	}
	time.Sleep(l.after)
	if op = w.s.op(); op.State != l.in {
		w.t.Fatalf("after %s it is %s, want %s", l.after, op.State, l.in)
	}
	return op, begun
}

// Within one boot a step of the wall clock changes nothing of a rollout, not even by a second; with a
// restart of Toad the window begins again, and nothing else does.
func TestWallClockStepsWithinABoot(t *testing.T) {
	for i, l := range clockLives {
		t.Run(l.name, func(t *testing.T) {
			var usual time.Duration // from the acceptance to the end
			inWorld(t, func(t *testing.T, w *world) {
				op, begun := w.live(i)
				w.expect(w.await(op.ID), l.end, l.code)
				usual = time.Since(begun)
			})
			for _, step := range []struct {
				name string
				make func(w *world)
			}{
				{"an hour back", func(w *world) { w.stepClock(-time.Hour) }},
				{"a month back", func(w *world) { w.stepClock(-30 * 24 * time.Hour) }},
				{"days ahead", func(w *world) { w.stepClock(5 * 24 * time.Hour) }},
				{"to 1970", func(w *world) { w.setClock(inTheSeventies) }},
				{"to 2100", func(w *world) { w.setClock(farAway) }},
				{"to and fro", func(w *world) {
					for _, by := range []time.Duration{time.Hour, -3 * time.Hour, 2*time.Hour + time.Second} {
						w.stepClock(by)
						time.Sleep(300 * time.Millisecond)
					}
				}},
			} {
				for _, restart := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s, restart=%v", step.name, restart), func(t *testing.T) {
						inWorld(t, func(t *testing.T, w *world) {
							op, begun := w.live(i)
							if restart {
								w.stop()
							}
							step.make(w)
							if restart {
								w.start()
							}
							stepped := time.Now()
							w.expect(w.await(op.ID), l.end, l.code)
							took := time.Since(begun)
							window := time.Duration(w.en.Probation.StabilityWindow)
							if again := restart && l.end == promoted && l.in == inProbation; again && (time.Since(stepped) < window || time.Since(stepped) > window+5*time.Second) {
								t.Errorf("promoted %s after the restart, the window is %s", time.Since(stepped), window)
							} else if !again && (took < usual-2*time.Second || took > usual+2*time.Second) {
								t.Errorf("it took %s, without a step %s", took, usual)
							}
							time.Sleep(time.Minute)
							w.promote("v3") // and later ones are taken as ever
						})
					})
				}
			}
		})
	}
}

// A host comes up with an absurd date in the middle of a rollout: its deadlines have passed, it ends soon
// and badly, and the target runs. Once the date is right again, deployments are as ever.
func TestBootWithAnAbsurdDate(t *testing.T) {
	for i, l := range clockLives {
		for _, date := range []time.Time{inTheSeventies, farAway} {
			for _, mended := range []time.Duration{time.Millisecond, time.Second, time.Hour} { // by the network's time
				t.Run(fmt.Sprintf("%s, %d, mended after %s", l.name, date.Year(), mended), func(t *testing.T) {
					inWorld(t, func(t *testing.T, w *world) {
						op, _ := w.live(i)
						target := w.s.rec.Load().Current.Image
						w.stop()
						w.h.reboot()
						w.set(func() { w.h.kernelBoot = "boot-2" })
						w.setClock(date)
						w.start()
						begun := time.Now()
						if mended < time.Hour {
							time.Sleep(mended)
							w.set(func() { w.h.wallOffset = 0 })
						}
						op = w.await(op.ID)
						took := time.Since(begun)
						if mended == time.Hour && (op.State == promoted || took > 3*time.Minute) {
							t.Errorf("in %d it ends %s after %s", date.Year(), op.State, took)
						}
						if window := time.Duration(w.en.Probation.StabilityWindow); op.State == promoted && took < window || took > 5*time.Minute {
							t.Errorf("it ends %s after %s", op.State, took)
						}
						if op.State != promoted {
							time.Sleep(time.Minute)
							w.expectRuns(target)
						}
						w.set(func() { w.h.wallOffset = 0 })
						time.Sleep(time.Minute)
						begun = time.Now()
						w.promote("v3")
						if d := time.Since(begun); d > time.Minute {
							t.Errorf("the next one takes %s", d)
						}
					})
				})
			}
		}
	}
}

// A rollout is accepted under an absurd date, which is then put right, and later the host boots: no deadline
// of a hundred years is left of it, and none that never comes.
func TestBootAfterAnAbsurdDateWasPutRight(t *testing.T) {
	for i, l := range clockLives {
		for _, date := range []time.Time{inTheSeventies, farAway} {
			t.Run(fmt.Sprintf("%s, %d", l.name, date.Year()), func(t *testing.T) {
				inWorld(t, func(t *testing.T, w *world) {
					w.setClock(date)
					w.live(i)
					target := w.s.rec.Load().Current.Image
					w.set(func() { w.h.wallOffset = 0 })
					time.Sleep(2 * time.Second) // and goes on under the right one
					op := w.s.op()
					if op.State.terminal() {
						t.Fatalf("it is %s", op.State)
					}
					w.stop()
					w.h.reboot()
					w.set(func() { w.h.kernelBoot = "boot-2" })
					w.start()
					begun := time.Now()
					op = w.await(op.ID)
					if d := time.Since(begun); op.State == promoted || d > 3*time.Minute {
						t.Errorf("it ends %s after %s", op.State, d)
					}
					time.Sleep(time.Minute)
					w.expectRuns(target)
					w.promote("v3")
				})
			})
		}
	}
}

// The clock goes back while Toad is away and the candidate restarts: systemd's counter tells of it, however
// late Podman's events say that they are.
func TestRestartsWhileToadIsDownAndTheClockGoesBack(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		op := w.submit(w.push("v2", app{readyAfter: time.Second}))
		w.awaitThat(op.ID, func(op *operation) bool { return op.FirstReady != nil })
		w.stop()
		w.stepClock(-time.Hour)
		for range 3 {
			w.h.kill("hello.service")
			time.Sleep(2 * time.Second)
		}
		w.start()
		w.expect(w.await(op.ID), rolledBack, "restart_budget")
	})
	// By hand, systemd's counter tells of one only, and of none of them what the instance before did.
	for by, end := range map[int]state{1: promoted, 3: rolledBack} {
		t.Run(fmt.Sprintf("%d by hand", by), func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.promote("v1")
				for range 4 {
					w.h.restartByHand("hello.service")
					time.Sleep(2 * time.Second)
				}
				op := w.submit(w.push("v2", app{readyAfter: time.Second}))
				w.awaitThat(op.ID, func(op *operation) bool { return op.FirstReady != nil })
				w.stop()
				w.stepClock(-time.Hour)
				for range by {
					w.h.restartByHand("hello.service")
					time.Sleep(2 * time.Second)
				}
				w.start()
				code := ""
				if end == rolledBack {
					code = "restart_budget"
				}
				w.expect(w.await(op.ID), end, code)
			})
		})
	}
}
