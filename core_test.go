package main

import (
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
