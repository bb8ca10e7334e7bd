// suspend.go is what operators ask of a service outside of a rollout: to stay down, to start again, to end
// for good, and to be open again after an operation that went wrong. Each is persisted before it is
// answered, and what it asks of the host is begun anew at every start of Toad until it is done.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// errNothing ends a commit that would change nothing.
var errNothing = errors.New("nothing to change")

// ask commits what was asked for and makes run turn to it. A refusal of change is returned as it is; one
// that is errNothing says that all is as asked already.
func (s *service) ask(e event, change func(r *record) error) (changed bool, err error) {
	if err := s.usable(); err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing() {
		return false, shuttingDown()
	}
	before := s.rec.Load().duty()
	switch err := s.commitLocked(change, e); {
	case errors.Is(err, errNothing):
		return false, nil
	case errors.As(err, new(*apiError)):
		return false, err
	case err != nil:
		return false, s.unavailable(err)
	}
	if s.rec.Load().duty() != before {
		s.setHealth(health{state: "unknown", observedAt: s.now()}) // until run has looked
		if s.cancelStep != nil {
			s.cancelStep(errSubmitted)
		}
		s.poke()
	}
	return true, nil
}

// suspend keeps the service down from now on, over reboots.
func (s *service) suspend(actor string) (changed bool, err error) {
	return s.ask(event{Type: "suspend", Actor: actor, Operation: s.currentOperation()}, func(r *record) error {
		switch {
		case r.Suspended != nil:
			return errNothing
		case r.duty() == retiring:
			return s.isRetiring()
		case r.active() != nil:
			return rolloutActive(r)
		case r.Current == nil:
			return refuse("no_revision", "%s has no promoted revision that could be suspended", s.name)
		}
		r.Suspended = &suspension{Since: s.now(), By: actor}
		r.Resume, r.Installed = nil, false
		return nil
	})
}

// resume starts the current revision of a suspended service again.
func (s *service) resume(actor string) (changed bool, err error) {
	return s.ask(event{Type: "resume", Actor: actor, Operation: s.currentOperation()}, func(r *record) error {
		switch {
		case r.duty() == retiring:
			return s.isRetiring()
		case r.Suspended == nil:
			return errNothing
		}
		r.Suspended, r.Resume = nil, &resumption{Since: s.now(), By: actor}
		return nil
	})
}

// reconcile lifts the barrier that this operation raised.
func (s *service) reconcile(id, actor string) (changed bool, err error) {
	return s.ask(event{Type: "reconcile", Actor: actor, Operation: id}, func(r *record) error {
		if _, err := s.bearer(actor); err != nil {
			return err
		}
		switch b := r.Barrier; {
		case b != nil && b.Operation == id:
			r.Barrier = nil
			return nil
		case b != nil:
			return barrierUp(b)
		case r.Operation != nil && r.Operation.ID == id:
			return errNothing
		}
		if _, err := s.data.operation(s.name, id); errors.Is(err, errNotFound) {
			return refuse("not_found", "there is no such operation")
		} else if err != nil {
			return s.unavailable(err)
		}
		return errNothing
	})
}

// retire ends a service whose enrollment is gone.
func (s *service) retire(generation int64, actor string) (changed bool, err error) {
	_, enErr := s.enrollment()
	return s.ask(event{Type: "retire", Actor: actor, Detail: "begun"}, func(r *record) error {
		switch {
		case r.Retired != nil:
			return errNothing
		case !errors.Is(enErr, errNotFound):
			return refuse("enrolled", "%s is enrolled: take its enrollment away first (a file that is gone counts for another %s)", s.name, moment)
		case r.active() != nil:
			return rolloutActive(r)
		case generation != r.Generation:
			e := refuse("stale_generation", "generation is %d, the current generation is %d", generation, r.Generation)
			e.CurrentGeneration = &r.Generation
			return e
		}
		r.Retired = &retirement{Since: s.now(), By: actor}
		r.Suspended, r.Resume, r.Installed = nil, nil, false
		return nil
	})
}

func (s *service) isRetiring() error { return refuse("suspended", "%s is being retired", s.name) }

func rolloutActive(r *record) error {
	e := refuse("rollout_active", "operation %s is under way", r.Operation.ID)
	e.CurrentGeneration, e.OperationID = &r.Generation, r.Operation.ID
	return e
}

func barrierUp(b *barrier) error {
	e := refuse("rollback_barrier", "operation %s went wrong and was not acknowledged: reconcile it first", b.Operation)
	e.OperationID = b.Operation
	return e
}

// hostPause is how long a host that did not do what it was asked is left alone.
const hostPause = 5 * time.Second

// stayDown keeps a suspended service stopped: whoever starts it, at a boot or by hand, it is stopped again.
// Its unit is not in [Install] while it is suspended.
func (s *service) stayDown(ctx context.Context) error {
	if err := s.settle(); err != nil {
		return err
	}
	down := false
	var nextRetention time.Time
	for {
		if err := s.stale(); err != nil {
			return err
		}
		r := s.rec.Load()
		if r.duty() != stayingDown {
			return nil
		}
		rev, err := s.data.revision(s.name, r.Current.Generation)
		if err != nil {
			return err
		}
		if !down {
			down, err = s.attempt(ctx, func(r *record) *[]string {
				if r.Suspended == nil {
					return nil
				}
				return &r.Suspended.Remains
			}, func() error {
				if err := s.bringDown(ctx, rev); err != nil {
					return err
				}
				return s.writeUnit(ctx, rev, candidateForm(rev.unit))
			})
			if err != nil {
				return err
			}
			if down {
				s.log.Info("the suspended service is down")
			} else if err := s.wait(ctx, hostPause); err != nil {
				return err
			}
			continue // it may be resumed by now
		}
		if !time.Now().Before(nextRetention) {
			nextRetention = time.Now().Add(retentionInterval)
			rctx, cancel := s.whileIdle(ctx, stayingDown)
			err := s.retention(rctx)
			cancel()
			if err != nil {
				return err
			}
		}
		st, err := s.host.units.Unit(ctx, serviceName(rev.Enrollment.Unit))
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			s.setHealth(health{state: "unknown", observedAt: s.now()})
		case !st.stopped():
			s.log.Warn("a suspended service was started by another hand", "state", st.ActiveState)
			s.setHealth(health{state: "running", observedAt: s.now()})
			down = false
			continue
		default:
			s.setHealth(health{state: "stopped", observedAt: s.now()})
		}
		if err := s.wait(ctx, watchInterval); err != nil {
			return err
		}
		s.signals.take()
	}
}

// bringDown stops the revision's unit and proves that nothing of it is left. A unit that is somebody
// else's is left alone.
func (s *service) bringDown(ctx context.Context, rev *revision) error {
	if err := s.owns(ctx, rev); err != nil {
		return err
	}
	s.tryHold(ctx, rev)
	return s.stopAndConfirm(ctx, rev, s.after(time.Duration(rev.Enrollment.StopDeadline)))
}

// attempt does what may have to be done again and tells whether it was done. What was in the way is
// persisted where remains says, and alerted when it changes. Its error is of the kind that ends a duty.
func (s *service) attempt(ctx context.Context, remains func(r *record) *[]string, do func() error) (done bool, err error) {
	err = do()
	if s.undecided(ctx, err) {
		return false, err
	}
	var now []string
	if err != nil {
		s.setHealth(health{state: "unknown", observedAt: s.now()})
		now = inTheWay(err)
	}
	if old := remains(s.rec.Load()); old == nil || slices.Equal(*old, now) {
		return err == nil, nil
	}
	if err != nil {
		s.alert("the service could not be brought down; it is tried again", "err", err)
	}
	return err == nil, s.commit(func(r *record) error {
		if p := remains(r); p != nil {
			*p = now
		}
		return nil
	})
}

// inTheWay says in public words why the host is not as it should be.
func inTheWay(err error) []string {
	if r := remainsOf(err); len(r) > 0 {
		return r
	}
	var c *codedError
	if errors.As(err, &c) {
		return []string{c.Summary}
	}
	return []string{"the host does not answer"}
}

// startAgain starts the current revision after a suspension. It is no rollout: what becomes of it is
// systemd's, and nothing is rolled back.
func (s *service) startAgain(ctx context.Context) error {
	alerted := false
	for {
		if err := s.stale(); err != nil {
			return err
		}
		r := s.rec.Load()
		if r.duty() != resuming {
			return nil
		}
		rev, err := s.data.revision(s.name, r.Current.Generation)
		if err != nil {
			return err
		}
		s.setHealth(health{state: "starting", observedAt: s.now()})
		rctx, cancel := s.whileIdle(ctx, resuming)
		err = s.startResumed(rctx, rev, r.Resume)
		cancel()
		switch {
		case err == nil:
			return nil
		case s.undecided(ctx, err):
			return err
		case s.rec.Load().duty() != resuming:
			return nil
		case !alerted:
			alerted = true
			s.alert("the resumed service could not be started; it is tried again", "err", err)
		}
		if err := s.wait(ctx, hostPause); err != nil {
			return err
		}
	}
}

func (s *service) startResumed(ctx context.Context, rev *revision, res *resumption) error {
	done := func() error {
		return s.commit(func(r *record) error {
			if r.Resume == nil {
				return errSubmitted
			}
			r.Resume, r.Installed = nil, true
			return nil
		})
	}
	if res.StartedAt != nil {
		// The start was meant, and maybe made.
		took, err := s.startedSince(ctx, rev, s.rec.Load().Watch.Before, *res.StartedAt)
		if err != nil {
			return err
		} else if took {
			return done()
		}
	}
	if err := s.bringDown(ctx, rev); err != nil { // the stop of the suspension may not have ended
		return err
	}
	if _, err := s.ensureImage(ctx, s.rec.Load().Current.reference); err != nil {
		return err
	}
	if err := s.writeUnit(ctx, rev, rev.unit); err != nil {
		return err
	}
	if err := s.startCurrent(ctx, rev, func(r *record, now time.Time) error {
		if r.duty() != resuming {
			return errSubmitted
		}
		r.Resume.StartedAt = &now
		return nil
	}); err != nil {
		return err
	}
	return done()
}

// end ends a retired service: its tokens, its instance, its unit and its images go, its records and events
// stay.
func (s *service) end(ctx context.Context) error {
	for {
		if err := s.stale(); err != nil {
			return err
		}
		if s.rec.Load().duty() != retiring {
			return nil
		}
		done, err := s.attempt(ctx, func(r *record) *[]string { return &r.Retired.Remains }, func() error {
			err := s.clear(ctx)
			if errors.Is(err, errCorrupt) { // a record that is only in the way: no reason to doubt the others
				return fmt.Errorf("%s: %w", err.Error(), stillThere{"a damaged record of the service; toad fsck names it"})
			}
			return err
		})
		if err != nil {
			return err
		}
		if done {
			s.log.Info("retired")
			if s.release != nil { // nothing is to be seen of its unit any more
				s.release()
				s.signals, s.release, s.held = nil, nil, ""
			}
			s.setHealth(health{state: "stopped", observedAt: s.now()})
			return s.commit(func(r *record) error {
				r.Current, r.Rollback, r.Held, r.Barrier, r.Watch = nil, nil, nil, nil, restarts{}
				r.Retired.Done = true
				return nil
			}, event{Type: "retire", Detail: "done: its instance, its unit and its images are gone"})
		}
		if err := s.wait(ctx, hostPause); err != nil {
			return err
		}
	}
}

// clear takes everything of the service from the host, and its images.
func (s *service) clear(ctx context.Context) error {
	if err := s.revokeAll(s.rec.Load().Retired.By); err != nil {
		return err
	}
	rev, err := s.lastRevision()
	if err != nil {
		return err
	}
	if rev != nil {
		if err := s.bringDown(ctx, rev); err != nil {
			return err
		}
		if err := s.removeUnit(ctx, rev); err != nil {
			return err
		}
	}
	if err := boundary("remove", s.images()); err != nil {
		return storageError("removing", s.images(), err)
	}
	if err := os.RemoveAll(s.images()); err != nil {
		return storageError("removing", s.images(), err)
	}
	return syncDir(filepath.Dir(s.images()))
}

// lastRevision is the revision whose unit may be on the host: all of a service have one unit and one
// container name, so it does not matter which. It is nil if there never was one.
func (s *service) lastRevision() (*revision, error) {
	r := s.rec.Load()
	var generations []int64
	if r.Held != nil {
		generations = append(generations, r.Held.Revision.Generation)
	}
	if r.Current != nil {
		generations = append(generations, r.Current.Generation)
	}
	if r.Operation != nil {
		generations = append(generations, r.Operation.Candidate.Generation)
	}
	for _, g := range generations {
		if rev, err := s.data.revision(s.name, g); !errors.Is(err, fs.ErrNotExist) {
			return rev, err
		}
	}
	return nil, nil
}
