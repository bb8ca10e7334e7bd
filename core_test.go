package main

import (
	"errors"
	"path/filepath"
	"slices"
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
				if st == rollingBack {
					a.exitAfter = time.Second
				}
				op := w.submit(w.push("v2", a))
				w.awaitState(op.ID, st)
				w.stop()
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
