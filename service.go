// service.go is one service in memory: its record and how that is committed, its run from start to end,
// its clocks, and what it waits for. What it does to the host is in rollout.go and watch.go.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// host is the world as a service is given it: the two drivers, five function values (wall clock, boot
// clock, boot identity, image fetch, probe), and where the Quadlet directory is.
type host struct {
	units      units
	containers containers

	wall   func() time.Time
	boot   func() time.Duration // CLOCK_BOOTTIME
	bootID func() string        // the kernel's random/boot_id
	fetch  func(ctx context.Context, dir, image string, limit byteSize) (imageInfo, error)
	probe  probeFunc

	quadlets string
	// hostPaths tells how the host names the data and the Quadlet directory: what runs on the host by
	// systemd's hand does not see Toad's mounts.
	hostPaths func(ctx context.Context) (data, quadlets string, err error)
}

// errRequested ends a step because a rollback of the operation was requested.
var errRequested = errors.New("rollback requested")

// errSubmitted ends what is done only while there is nothing to roll out.
var errSubmitted = errors.New("an operation was accepted")

// service is one enrolled service: the single writer of its record, its unit and its instance.
type service struct {
	// never changes
	name   string
	data   *dataDir
	host   *host
	enroll func() (enrolled, error) // the enrollment in force, read anew
	log    *slog.Logger

	mu  sync.Mutex // guards commits; never held across a call to the host
	rec atomic.Pointer[record]
	// ev, broken and cancelStep are guarded by mu.
	ev         *eventLog
	broken     error // a commit failed: nothing is committed until the disk was read again
	cancelStep context.CancelCauseFunc

	wake chan struct{} // one token: look again

	// owned by run
	signals *unitSignals
	held    string // the unit that signals are of
	release func()
	// restartTold is when a restart after promotion was last told.
	restartTold time.Time

	live live
}

// live is what is known now and not kept on disk.
type live struct {
	sync.Mutex
	changed     chan struct{} // closed at every change of record or live state
	unavailable error         // why the record cannot be used; set until the first load
	closing     bool          // no new operation is taken
	readyFor    time.Duration
	health      health
	problems    []wireProblem   // of the retained rollback
	checked     bool            // the retained rollback was looked at
	log         *operationLog   // of the operation under way or last ended
	recent      []pastOperation // those before it, newest first
	unit        lookedUnit      // as last looked at, by whoever looked
	container   lookedContainer
	claimed     claim // what the revision of this generation runs as
	claimedBy   int64
}

// health is runtime health, apart from any outcome.
type health struct {
	state      string // running, starting, stopped, failed, held, foreign, unknown
	ready      bool
	observedAt time.Time
	digest     string
	current    bool // what runs is the current revision
}

func newService(name string, data *dataDir, h *host, enroll func() (enrolled, error), log *slog.Logger) *service {
	s := &service{name: name, data: data, enroll: enroll, log: log.With("service", name), wake: make(chan struct{}, 1)}
	s.live.changed = make(chan struct{})
	s.live.unavailable = errors.New("not read yet")
	s.live.health.state = "unknown"
	own := *h
	own.units, own.containers = looking{h.units, h.containers, s}, looking{h.units, h.containers, s}
	s.host = &own
	return s
}

// run owns the service until ctx ends. Whatever leaves it not knowing what is on disk (a failed write)
// makes it forget everything and begin from the disk again; only this service is affected.
func (s *service) run(ctx context.Context) {
	defer func() {
		if s.release != nil {
			s.release()
		}
	}()
	for backoff := time.Second; ; backoff = min(2*backoff, 30*time.Second) {
		begun := time.Now()
		err := s.incarnation(ctx)
		if ctx.Err() != nil {
			return
		}
		s.setUnavailable(err)
		s.alert("state-unavailable", "err", err)
		if time.Since(begun) > time.Minute {
			backoff = time.Second
		}
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-time.After(backoff):
		}
	}
}

// incarnation reads the records and does what they ask for until ctx ends or the disk fails.
func (s *service) incarnation(ctx context.Context) error {
	if err := s.open(); err != nil {
		return err
	}
	if op := s.rec.Load().active(); op != nil {
		s.say("resumed", op.State)
	}
	for {
		err := s.stale()
		switch r := s.rec.Load(); {
		case err != nil:
		case r.active() != nil:
			err = s.rollout(ctx)
		case r.Held != nil:
			err = s.unhold(ctx)
		default:
			err = s.watch(ctx)
		}
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// open loads the record and brings the event log in step with it. Both are durable afterwards.
func (s *service) open() error {
	s.mu.Lock() // whoever still holds a record from before commits before this or fails
	r, err := s.read()
	s.mu.Unlock()
	if err != nil {
		return err
	}
	recent := s.readRecent(r)
	s.live.Lock()
	s.live.unavailable = nil
	s.live.recent = recent
	s.live.log = nil
	if r.Operation != nil {
		s.live.log = s.data.openLog(s.name, r.Operation.ID)
	}
	s.live.Unlock()
	s.notify()
	return nil
}

// read is open's reading, under mu.
func (s *service) read() (*record, error) {
	r, err := s.data.load(s.name)
	if err != nil {
		return nil, err
	}
	if err := makeDir(s.data.serviceFile(s.name)); err != nil {
		return nil, err
	}
	// A directory that a killed predecessor made is found, and maybe not durable yet.
	for _, dir := range []string{filepath.Dir(s.data.serviceFile(s.name)), s.data.serviceFile(s.name)} {
		if err := syncDir(dir); err != nil {
			return nil, err
		}
	}
	ev, err := s.data.openEvents(r)
	if err != nil {
		return nil, err
	}
	s.ev, s.broken = ev, nil
	s.rec.Store(r)
	return r, nil
}

// stale tells that a commit failed, whoever made it: what is on disk is unknown until it is read again.
func (s *service) stale() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.broken
}

// notify wakes everyone who waits for a change.
func (s *service) notify() {
	s.live.Lock()
	close(s.live.changed)
	s.live.changed = make(chan struct{})
	s.live.Unlock()
}

func (s *service) changed() <-chan struct{} {
	s.live.Lock()
	defer s.live.Unlock()
	return s.live.changed
}

func (s *service) setUnavailable(err error) {
	s.live.Lock()
	s.live.unavailable = err
	s.live.Unlock()
	s.notify()
}

// poke makes run look again.
func (s *service) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// op is the operation under way or last ended. The record it belongs to is never changed, only replaced.
func (s *service) op() *operation { return s.rec.Load().Operation }

// commit replaces service.json by what change makes of it, together with the events that this makes
// known. It is durable when it returns nil, the event log included. An error of change is returned as
// it is and nothing happens; errStorage leaves open what is on disk.
func (s *service) commit(change func(r *record) error, events ...event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.commitLocked(change, events...)
}

func (s *service) commitLocked(change func(r *record) error, events ...event) (err error) {
	if s.broken != nil {
		return s.broken
	}
	defer func() {
		if errors.Is(err, errStorage) {
			s.broken = err
			s.poke() // run begins from the disk
		}
	}()
	now := s.now()
	old := s.rec.Load()
	r := old.clone()
	if err := change(r); err != nil {
		return err
	}
	if op := r.Operation; op != nil {
		if old.Operation != nil && old.Operation.ID == op.ID && old.Operation.State != op.State {
			if !slices.Contains(nextStates[old.Operation.State], op.State) {
				return fmt.Errorf("operation %s cannot go from %s to %s", op.ID, old.Operation.State, op.State)
			}
			op.Timeline = append(op.Timeline, transition{op.State, now})
			op.Step = ""
			if op.State.terminal() {
				op.FinishedAt = &now
			}
		}
		// It never goes back: by it a deadline tells, after a reboot, that the wall clock did.
		if (!op.State.terminal() || op.FinishedAt == &now) && now.After(op.UpdatedAt) {
			op.UpdatedAt = now
		}
	}
	r.UpdatedAt = now
	r.EventHead, r.Events = s.ev.head, nil
	for head := s.ev.head; len(r.Events) < len(events); {
		e := events[len(r.Events)]
		e.At, e.Service = now, s.name
		if e.Operation == "" && r.Operation != nil {
			e.Operation = r.Operation.ID
		}
		if e.Actor == "" {
			e.Actor = "toad"
		}
		head = e.seal(head)
		r.Events = append(r.Events, e)
	}
	if err := s.data.save(r); err != nil {
		return err
	}
	s.rec.Store(r)
	err = s.data.withReserve(func() error { return s.ev.append(r.Events) })
	if r.Operation != nil && (old.Operation == nil || old.Operation.ID != r.Operation.ID) {
		s.live.Lock()
		if old.Operation != nil {
			s.live.recent = append([]pastOperation{pastOf(old.Operation, s.live.log)}, s.live.recent[:min(len(s.live.recent), maxRecent-1)]...)
		}
		s.live.log = s.data.openLog(s.name, r.Operation.ID)
		s.live.readyFor = 0
		s.live.Unlock()
	}
	s.notify()
	return err
}

// advance takes the operation to its next state.
func (s *service) advance(to state, change func(op *operation), events ...event) error {
	err := s.commit(func(r *record) error {
		r.Operation.State = to
		if change != nil {
			change(r.Operation)
		}
		return nil
	}, events...)
	if err == nil {
		s.log.Info("state", "operation", s.op().ID, "generation", s.op().Candidate.Generation, "state", to)
	}
	return err
}

// intend persists a step before it is done.
func (s *service) intend(step string, change func(r *record)) error {
	return s.commit(func(r *record) error {
		r.Operation.Step = step
		if change != nil {
			change(r)
		}
		return nil
	})
}

// now is the wall clock as records hold it.
func (s *service) now() time.Time { return s.host.wall().UTC().Truncate(time.Millisecond) }

// say adds a line to the operation's log, and the same to the journal.
func (s *service) say(code string, args ...any) {
	op := s.op()
	s.live.Lock()
	l := s.live.log
	s.live.Unlock()
	if op == nil || l == nil {
		return
	}
	l.say(s.now(), op.State, code, args...)
	s.log.Info(fmt.Sprintf(logTexts[code], args...), "operation", op.ID)
}

// alert is one line to the journal at priority err: an operator should look.
func (s *service) alert(what string, args ...any) { s.log.Error(what, args...) }

// after makes the deadline that lies d from now.
func (s *service) after(d time.Duration) *deadline {
	return &deadline{At: s.now().Add(d), Boot: (s.host.boot() + d).Seconds(), BootID: s.host.bootID()}
}

// left is the time until a deadline. Within one boot of the kernel its boot clock decides; over a
// reboot the wall clock, and one that went back behind the last commit is a passed deadline.
func (s *service) left(d *deadline) time.Duration {
	if d.BootID == s.host.bootID() {
		return time.Duration(d.Boot*float64(time.Second)) - s.host.boot()
	}
	if s.now().Before(s.op().UpdatedAt) {
		return -1
	}
	return d.At.Sub(s.host.wall())
}

// within bounds a step by a deadline and lets a rollback request end it.
func (s *service) within(ctx context.Context, d *deadline) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	s.mu.Lock()
	s.cancelStep = cancel
	requested := s.op().RollbackRequested && s.op().State != rollingBack
	s.mu.Unlock()
	if requested {
		cancel(errRequested)
	}
	ctx, stop := context.WithTimeoutCause(ctx, s.left(d), context.DeadlineExceeded)
	return ctx, func() {
		stop()
		s.mu.Lock()
		s.cancelStep = nil
		s.mu.Unlock()
		cancel(nil)
	}
}

// wait sleeps until d is over, something was signalled, or run was poked.
func (s *service) wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(max(d, 0))
	defer t.Stop()
	var c <-chan struct{}
	if s.signals != nil {
		c = s.signals.C
	}
	select {
	case <-t.C:
	case <-c:
	case <-s.wake:
	case <-ctx.Done():
	}
	return ctx.Err()
}

// hold keeps the unit loaded and its signals coming for as long as the service is run.
func (s *service) hold(ctx context.Context, unit string) error {
	if s.held == unit {
		return nil
	}
	sig, release, err := s.host.units.Hold(ctx, unit)
	if err != nil {
		return fmt.Errorf("holding %s: %w", unit, err)
	}
	if s.release != nil {
		s.release()
	}
	s.signals, s.release, s.held = sig, release, unit
	return nil
}

// bootNow tells this boot from any other: a reboot changes the kernel's boot id, a restarted user
// manager its own start time.
func (s *service) bootNow(ctx context.Context) (string, error) {
	m, err := s.host.units.Incarnation(ctx)
	if err != nil {
		return "", fmt.Errorf("reading the user manager's start time: %w", err)
	}
	return s.host.bootID() + "/" + m, nil
}

// claim is what the current revision runs as; false if there is none. The disk is read once a revision.
func (s *service) claim() (claim, bool) {
	r := s.rec.Load()
	if r == nil || r.Current == nil {
		return claim{}, false
	}
	s.live.Lock()
	defer s.live.Unlock()
	if g := r.Current.Generation; s.live.claimedBy != g {
		rev, err := s.data.revision(s.name, g)
		if err != nil {
			return claim{}, false
		}
		s.live.claimed, s.live.claimedBy = claim{unit: rev.Enrollment.Unit, container: rev.Container}, g
	}
	return s.live.claimed, true
}

func (s *service) images() string { return s.data.serviceFile(s.name, "images") }

// unitPath is where the unit of this service is written: a directory of its own, because a file that
// the generator cannot load takes every unit of its directory down with it.
func (s *service) unitPath(unit string) string {
	return filepath.Join(s.host.quadlets, s.name, unit)
}

// submission is a request for a rollout, well formed.
type submission struct {
	kind, image, key, hash, actor string
	expected                      int64
}

// submit accepts a rollout, or returns the operation that the key already made. The operation is durable
// when it returns. The order of its checks is part of the API, and a refusal changes nothing.
func (s *service) submit(sub submission) (op *operation, existing bool, err error) {
	if err := s.usable(); err != nil {
		return nil, false, err
	}
	// The enrollment is read before the lock: a slow disk there holds up nobody's commit.
	en, enErr := s.enroll()
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.rec.Load()

	if o := r.Operation; o != nil && o.Key == sub.key {
		if o.RequestHash != sub.hash {
			return nil, false, keyReused(o.ID)
		}
		return o, true, nil
	}
	switch k, err := s.data.key(s.name, sub.key); {
	case err == nil && k.RequestHash != sub.hash:
		return nil, false, keyReused(k.Operation)
	case err == nil:
		o, err := s.data.operation(s.name, k.Operation)
		if errors.Is(err, errNotFound) { // pruned: its end is in the key's file
			o = &operation{ID: k.Operation, State: k.State, CreatedAt: idTime(k.Operation), UpdatedAt: k.FinishedAt, FinishedAt: &k.FinishedAt}
		} else if err != nil {
			return nil, false, s.unavailable(err)
		}
		return o, true, nil
	case !errors.Is(err, errNotFound):
		return nil, false, s.unavailable(err)
	}
	s.live.Lock()
	closing := s.live.closing
	s.live.Unlock()
	if closing {
		return nil, false, refuse("shutting_down", "toad is shutting down; try again")
	}
	if enErr != nil {
		e := refuse("enrollment_invalid", "the enrollment of %s does not allow deployments: %s", s.name, enErr)
		return nil, false, e
	}
	kind, image := sub.kind, sub.image
	if kind == "rollback" {
		switch {
		case r.Rollback == nil:
			return nil, false, refuse("not_rollbackable", "there is no retained revision to go back to")
		case r.Current.ByRollback:
			return nil, false, refuse("not_rollbackable", "the current revision is itself the outcome of a rollback; deploy a digest")
		}
		image = r.Rollback.Image
	}
	if repository, _, _ := strings.Cut(image, "@"); repository != en.Repository {
		return nil, false, refuse("repository_not_allowed", "%s may be deployed from %s only", s.name, en.Repository)
	}
	if r.Held != nil {
		return nil, false, refuse("held", "the service is held until what is still there is gone: %s", strings.Join(r.Held.Remains, "; "))
	}
	if a := r.active(); a != nil {
		e := refuse("rollout_active", "operation %s is under way", a.ID)
		e.CurrentGeneration, e.OperationID = &r.Generation, a.ID
		return nil, false, e
	}
	if sub.expected != r.Generation {
		e := refuse("stale_generation", "expected_generation is %d, the current generation is %d", sub.expected, r.Generation)
		e.CurrentGeneration = &r.Generation
		return nil, false, e
	}
	switch err := s.data.room(); {
	case errors.Is(err, syscall.ENOSPC):
		e := refuse("state_unavailable", "there is no room for the records of %s: free some space on the host, then deploy again", s.name)
		e.err = err
		return nil, false, e
	case err != nil:
		return nil, false, s.unavailable(err)
	}
	if r.Operation != nil {
		if err := s.data.archive(s.name, r.Operation); err != nil {
			return nil, false, s.unavailable(err)
		}
	}
	now := s.now()
	o := &operation{
		ID: newOperationID(now), Kind: kind, Key: sub.key, RequestHash: sub.hash, RequestedBy: sub.actor, Enrollment: en.Hash, Expected: sub.expected,
		Candidate: reference{Generation: r.NextGeneration, Image: image},
		Previous:  r.Current, State: preparing, Timeline: []transition{{preparing, now}}, CreatedAt: now, UpdatedAt: now,
		FetchDeadline:    s.after(time.Duration(en.FetchDeadline)),
		StabilitySeconds: seconds(time.Duration(en.Probation.StabilityWindow)), RestartBudget: en.Probation.RestartBudget,
	}
	o.Candidate.Operation = o.ID
	if err := s.commitLocked(func(r *record) error {
		r.Operation = o
		r.NextGeneration++
		return nil
	}, event{Type: "deploy", Operation: o.ID, Actor: sub.actor, Detail: image}); err != nil {
		return nil, false, s.unavailable(err) // whether it was accepted is on the disk
	}
	if s.cancelStep != nil { // what is done while idle
		s.cancelStep(errSubmitted)
	}
	code := "accepted"
	if kind == "rollback" {
		code = "rollback_accepted"
	}
	s.say(code, image, o.Candidate.Generation)
	s.poke()
	return s.op(), false, nil
}

func keyReused(id string) error {
	e := refuse("key_reused", "this idempotency_key was used for another request")
	e.OperationID = id
	return e
}

// usable refuses whatever needs the record while it cannot be used.
func (s *service) usable() error {
	s.live.Lock()
	defer s.live.Unlock()
	if s.live.unavailable != nil {
		return s.unavailable(s.live.unavailable)
	}
	return nil
}

func (s *service) unavailable(err error) error {
	e := refuse("state_unavailable", "the records of %s cannot be read or written now", s.name)
	e.err = err
	return e
}

// requestRollback asks the operation to end. again tells that it is ending already.
func (s *service) requestRollback(id, actor string) (op *operation, again bool, err error) {
	if err := s.usable(); err != nil {
		return nil, false, err
	}
	s.mu.Lock()
	o := s.op()
	switch {
	case o == nil || o.ID != id || o.State.terminal():
		s.mu.Unlock()
		e := refuse("not_rollbackable", "the operation has ended")
		e.OperationID = id
		return nil, false, e
	case o.State == rollingBack || o.RollbackRequested:
		s.mu.Unlock()
		return o, true, nil
	}
	err = s.commitLocked(func(r *record) error {
		r.Operation.RollbackRequested, r.Operation.RollbackBy = true, actor
		return nil
	})
	cancel := s.cancelStep
	o = s.op()
	s.mu.Unlock()
	if err != nil {
		return nil, false, s.unavailable(err)
	}
	s.say("rollback_requested", actor)
	if cancel != nil {
		cancel(errRequested)
	}
	s.poke()
	return o, false, nil
}
