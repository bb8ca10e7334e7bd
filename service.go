// service.go is one service in memory: its record and how that is committed, its run from start to end,
// its clocks, and what it waits for. What it does to the host is in rollout.go and watch.go.
package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// host is the world as a service is given it: the two drivers, the clocks, and what else it asks for.
type host struct {
	units      units
	containers containers

	wall   func() time.Time
	boot   func() time.Duration // CLOCK_BOOTTIME
	bootID func() string        // the kernel's random/boot_id
	fetch  func(ctx context.Context, dir, image string, limit byteSize) (imageInfo, error)
	probe  probeFunc
	// inspect says what a fetch would find wrong with an image, and stores nothing.
	inspect func(ctx context.Context, dir, image string, limit byteSize) error

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
	// broken, unsure and cancelStep are guarded by mu.
	broken     error    // a commit failed: nothing is committed until the disk was read again
	unsure     *attempt // that commit
	cancelStep context.CancelCauseFunc

	ev    atomic.Pointer[eventLog] // appended to under mu
	tally tally
	index *tokenIndex // of every service's tokens
	// What tokens.json says, guarded by mu.
	issued    []*token
	owed      []tokenEvent
	unsaved   bool   // a revocation is not durable yet
	tokensErr error  // why the file is not to be trusted
	archived  string // the ended operation whose archive is durable; set by run
	recounted bool   // what the tokens had accepted before this start is known

	wake chan struct{} // one token: look again

	// owned by run
	signals *unitSignals
	held    string // the unit that signals are of
	release func()
	beside  sync.WaitGroup // what run leaves to be done beside it
	// unhealthy is the generation that was told to be unhealthy, and not to be healthy since.
	unhealthy int64
	// restartTold is when a restart after promotion was last told.
	restartTold time.Time

	live live
}

// attempt is a commit of which the disk alone knows what became.
type attempt struct {
	record *record
	settle func(done bool) // of what it took from the tally
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
	ofCurrent   []wireProblem   // of the current revision, if it had to be put back
	checked     bool            // both were looked at
	checkedOf   [2]int64        // the generations that were current and retained then
	log         *operationLog   // of the operation under way or last ended
	recent      []pastOperation // the operations before it, newest first
	claimed     claim           // what the revision of the generation claimedBy runs as
	claimedBy   int64
	unit        lookedUnit // as last looked at, by whoever looked
	container   lookedContainer
	outcomes    map[state]int // operations that ended since Toad's start
	enrolled    enrolled      // the enrollment as last read
	enrollErr   error         // why there is none
	compared    comparison    // of it
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
	s := &service{name: name, data: data, enroll: enroll, log: log.With("service", name), wake: make(chan struct{}, 1), tally: newTally(), index: &tokenIndex{}}
	s.live.changed = make(chan struct{})
	s.live.outcomes = map[state]int{}
	s.live.unavailable = errors.New("not read yet")
	s.live.enrollErr = errors.New("not read yet")
	s.live.health.state = "unknown"
	own := *h
	own.units, own.containers = looking{h.units, h.containers, s}, looking{h.units, h.containers, s}
	s.host = &own
	return s
}

// run owns the service until ctx ends. Whatever leaves it not knowing what is on disk (a failed write)
// makes it forget everything and begin from the disk again; only this service is affected.
func (s *service) run(ctx context.Context) {
	defer s.beside.Wait()
	s.beside.Go(func() { s.tally.run(ctx, s.commitCounted) })
	defer func() {
		if s.release != nil {
			s.release()
		}
	}()
	told := false // in Toad's own log: the service's may be what is wrong
	for backoff := time.Second; ; backoff = min(2*backoff, 30*time.Second) {
		begun := time.Now()
		err := s.incarnation(ctx)
		if ctx.Err() != nil {
			return
		}
		told = told && s.usable() != nil // it was open since
		s.setUnavailable(err)
		s.alert("state-unavailable", "err", err)
		if !told {
			terr := s.data.ownEvent("state-unavailable", s.name+": its records cannot be read or written, and it takes no deployment")
			if terr != nil {
				s.log.Warn("telling that the state is unavailable", "err", terr)
			}
			told = terr == nil
		}
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
		if err == nil {
			switch s.rec.Load().duty() {
			case rollingOut:
				err = s.rollout(ctx)
			case retiring:
				err = s.end(ctx)
			case holding:
				err = s.unhold(ctx)
			case stayingDown:
				err = s.stayDown(ctx)
			case resuming:
				err = s.startAgain(ctx)
			default:
				err = s.watch(ctx)
			}
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
	if err == nil {
		var log *operationLog
		if r.Operation != nil {
			log = s.data.openLog(s.name, r.Operation.ID)
		}
		s.live.Lock()
		s.live.log = log
		s.live.Unlock()
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	recent := s.readRecent(r)
	if e := s.lastTold("unhealthy", "healthy"); e.Type == "unhealthy" && r.Current != nil && e.Operation == r.Current.Operation {
		s.unhealthy = r.Current.Generation
	}
	s.live.Lock()
	s.live.unavailable = nil
	s.live.recent = recent
	s.live.health = health{state: "unknown"} // what was seen before counts no more
	s.live.Unlock()
	s.notify()
	return nil
}

// lastTold is the last event of one of these types, so that what was told before a restart is taken back after
// it. It looks at the log's last hundred.
func (s *service) lastTold(types ...string) (last event) {
	events, _, _, err := s.ev.Load().since(max(0, s.rec.Load().eventEnd().Cursor-100), 100)
	if err != nil {
		s.log.Warn("reading the last events", "err", err)
	}
	for _, e := range events {
		if slices.Contains(types, e.Type) {
			last = e
		}
	}
	return last
}

// read is open's reading, under mu.
func (s *service) read() (*record, error) {
	s.readTokens() // they hold whatever becomes of the record
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
	if g := r.needs(); g != 0 {
		if _, err := s.data.revision(s.name, g); err != nil {
			return nil, err
		}
	}
	ev, err := s.data.openEvents(r)
	if err != nil {
		return nil, err
	}
	if a := s.unsure; a != nil {
		is, err := encodeRecord(r)
		tried, err2 := encodeRecord(a.record)
		a.settle(err == nil && err2 == nil && bytes.Equal(is, tried))
	}
	s.broken, s.unsure = nil, nil
	if old := s.ev.Swap(ev); old != nil {
		old.wake() // who waits for more of it goes on with the new one
	}
	s.rec.Store(r)
	if err := s.tellTokens(); err != nil {
		select {
		case <-s.wake: // run waits before it tries again
		default:
		}
		return nil, err
	}
	return s.rec.Load(), nil
}

// commitCounted writes the counted events that are due. With no room on the disk it leaves them counted: a
// commit that fails closes the service, and what they tell is not worth that.
func (s *service) commitCounted() error {
	if err := s.usable(); err != nil {
		return err
	}
	if err := s.data.room(); err != nil {
		return err
	}
	return s.commit(unchanged)
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

// raisesBarrier tells whether an ended operation closes its service: the candidate was rolled back, failed
// after activation began, or is itself a rollback of what had been promoted.
func (o *operation) raisesBarrier(from state) bool {
	return o.Barrier && (o.State == rolledBack || o.State == hasFailed && from != preparing || o.State == promoted && o.Kind == "rollback")
}

// op is the operation under way or last ended. The record it belongs to is never changed, only replaced.
func (s *service) op() *operation {
	if r := s.rec.Load(); r != nil {
		return r.Operation
	}
	return nil
}

// commit replaces service.json by what change makes of it, together with the events that this makes
// known. It is durable when it returns nil, the event log included. An error of change is returned as
// it is and nothing happens; errStorage leaves open what is on disk.
func (s *service) commit(change func(r *record) error, events ...event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.commitLocked(change, events...)
}

// unchanged is the change of a commit for its events alone.
func unchanged(*record) error { return nil }

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
				if op.raisesBarrier(old.Operation.State) {
					r.Barrier = &barrier{op.ID, now}
				}
			}
		}
		// It never goes back: by it a deadline tells, after a reboot, that the wall clock did.
		if (!op.State.terminal() || op.FinishedAt == &now) && now.After(op.UpdatedAt) {
			op.UpdatedAt = now
		}
	}
	r.UpdatedAt = now
	var once, flood []event
	for _, e := range events {
		if e.Operation == "" && r.Operation != nil && !strings.HasPrefix(e.Type, "token-") {
			e.Operation = r.Operation.ID
		}
		e.Actor = cmp.Or(e.Actor, "toad")
		if floods(e.Type) {
			flood = append(flood, e)
		} else {
			once = append(once, e)
		}
	}
	due, settle := s.tally.take(flood)
	ev := s.ev.Load()
	r.EventHead, r.Events = ev.head, nil
	head := ev.head
	for _, e := range append(once, due...) {
		e.At, e.Service = now, s.name
		head = e.seal(head)
		r.Events = append(r.Events, e)
	}
	if err := s.data.save(r); err != nil {
		if errors.Is(err, errStorage) {
			s.unsure = &attempt{r, settle}
		} else {
			settle(false)
		}
		return err
	}
	settle(true)
	if r.Operation != nil && (old.Operation == nil || old.Operation.ID != r.Operation.ID) {
		log := s.data.openLog(s.name, r.Operation.ID)
		s.live.Lock()
		if old.Operation != nil {
			s.live.recent = append([]pastOperation{pastOf(old.Operation, s.live.log)}, s.live.recent[:min(len(s.live.recent), maxRecent-1)]...)
		}
		s.live.log = log // before the operation is seen
		s.live.readyFor = 0
		s.live.Unlock()
	}
	s.rec.Store(r)
	err = s.data.withReserve(func() error { return ev.append(r.Events) })
	if op := r.Operation; op != nil && op.State.terminal() && (old.Operation == nil || old.Operation.State != op.State) {
		s.live.Lock()
		s.live.outcomes[op.State]++
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
		r.Resume = nil // the operation looks after the instance from here
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
	if op == nil {
		return
	}
	l := s.logOf(op.ID)
	if l == nil {
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

// step is a context that cancelStep ends; at once with what over says under mu, if that is not nil.
func (s *service) step(ctx context.Context, over func() error) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	s.mu.Lock()
	s.cancelStep = cancel
	why := over()
	s.mu.Unlock()
	if why != nil {
		cancel(why)
	}
	return ctx, func() {
		s.mu.Lock()
		s.cancelStep = nil
		s.mu.Unlock()
		cancel(nil)
	}
}

// within bounds a step by a deadline and lets a rollback request end it.
func (s *service) within(ctx context.Context, d *deadline) (context.Context, context.CancelFunc) {
	ctx, end := s.step(ctx, func() error {
		if op := s.op(); op.RollbackRequested && op.State != rollingBack {
			return errRequested
		}
		return nil
	})
	ctx, stop := context.WithTimeoutCause(ctx, s.left(d), context.DeadlineExceeded)
	return ctx, func() {
		stop()
		end()
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

// tryHold holds a revision's unit where a host that does not answer is no reason to stop.
func (s *service) tryHold(ctx context.Context, rev *revision) {
	if err := s.hold(ctx, serviceName(rev.Enrollment.Unit)); err != nil {
		s.log.Warn("holding the unit", "err", err)
	}
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
	g := r.Current.Generation
	s.live.Lock()
	c, by := s.live.claimed, s.live.claimedBy
	s.live.Unlock()
	if by == g {
		return c, true
	}
	rev, err := s.data.revision(s.name, g)
	if err != nil {
		return claim{}, false
	}
	c = claim{unit: rev.Enrollment.Unit, container: rev.Container}
	s.live.Lock()
	s.live.claimed, s.live.claimedBy = c, g
	s.live.Unlock()
	return c, true
}

// comparison is whether an enrollment is another than the one that a revision was accepted under: it takes
// effect with the next deployment.
type comparison struct {
	generation int64
	hash       string // of the enrollment
	differs    bool
}

// of tells that this enrollment and the current revision of r are what was compared.
func (c comparison) of(r *record, hash string) bool {
	return r != nil && r.Current != nil && c.generation == r.Current.Generation && c.hash == hash
}

// enrollment reads the enrollment in force anew.
func (s *service) enrollment() (enrolled, error) {
	en, err := s.enroll()
	s.enrolledAs(en, err)
	return en, err
}

// enrolledAs keeps an enrollment for whoever reads from memory. The current revision is read from the disk
// once for each pair of both.
func (s *service) enrolledAs(en enrolled, err error) {
	s.live.Lock()
	s.live.enrolled, s.live.enrollErr = en, err
	c := s.live.compared
	s.live.Unlock()
	r := s.rec.Load()
	if err != nil || r == nil || r.Current == nil || c.of(r, en.Hash) {
		return
	}
	rev, err := s.data.revision(s.name, r.Current.Generation)
	if err != nil {
		return // fsck says it
	}
	unit := renderUnit(en, unitIdentity{DataID: s.data.id, Service: s.name, Generation: rev.Generation, Operation: rev.Operation, Image: rev.Image})
	s.live.Lock()
	s.live.compared = comparison{rev.Generation, en.Hash, rev.Enrollment != en.enrollment || !bytes.Equal(unit, rev.unit)}
	s.live.Unlock()
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
	en, enErr := s.enrollment()
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.rec.Load()
	bearer, err := s.bearer(sub.actor)
	if err != nil {
		return nil, false, err
	}
	if s.tokensErr != nil {
		return nil, false, s.unavailable(s.tokensErr)
	}
	if o, err := s.known(sub, r); o != nil || err != nil {
		return o, o != nil, err
	}
	for _, err := range s.admission(sub, r, en, enErr, s.exhausted(bearer), s.data.room) {
		if err != nil {
			return nil, false, err
		}
	}
	image := sub.wants(r)
	if r.Operation != nil && s.archived != r.Operation.ID {
		if err := s.data.archive(s.name, r.Operation); err != nil {
			return nil, false, s.unavailable(err)
		}
	}
	now := s.now()
	after := now // ids sort by time, whatever the wall clock does
	if r.Operation != nil && !after.After(idTime(r.Operation.ID)) {
		after = idTime(r.Operation.ID).Add(time.Millisecond)
	}
	o := &operation{
		ID: newOperationID(after), Kind: sub.kind, Key: sub.key, RequestHash: sub.hash, RequestedBy: sub.actor, Enrollment: en.Hash, Expected: sub.expected,
		Candidate: reference{Generation: r.NextGeneration, Image: image},
		Previous:  r.Current, State: preparing, Timeline: []transition{{preparing, now}}, CreatedAt: now, UpdatedAt: now,
		FetchDeadline:    s.after(time.Duration(en.FetchDeadline)),
		StabilitySeconds: seconds(time.Duration(en.Probation.StabilityWindow)), RestartBudget: en.Probation.RestartBudget, Barrier: en.Barrier,
	}
	o.Candidate.Operation = o.ID
	if err := s.commitLocked(func(r *record) error {
		r.Operation, r.Retired = o, nil
		r.NextGeneration++
		return nil
	}, event{Type: "deploy", Operation: o.ID, Actor: sub.actor, Detail: image}); err != nil {
		return nil, false, s.unavailable(err) // whether it was accepted is on the disk
	}
	if bearer != nil {
		bearer.accepted = append(bearer.accepted, now)
	}
	if s.cancelStep != nil { // what is done while idle
		s.cancelStep(errSubmitted)
	}
	code := "accepted"
	if sub.kind == "rollback" {
		code = "rollback_accepted"
	}
	s.say(code, image, o.Candidate.Generation)
	s.poke()
	return s.op(), false, nil
}

// known is the operation that the key already made, nil if there is none.
func (s *service) known(sub submission, r *record) (*operation, error) {
	if o := r.Operation; o != nil && o.Key == sub.key {
		if o.RequestHash != sub.hash {
			return nil, keyReused(o.ID)
		}
		return o, nil
	}
	switch k, err := s.data.key(s.name, sub.key); {
	case errors.Is(err, errNotFound):
		return nil, nil
	case err != nil:
		return nil, s.unavailable(err)
	case k.RequestHash != sub.hash:
		return nil, keyReused(k.Operation)
	default:
		o, err := s.data.operation(s.name, k.Operation)
		if errors.Is(err, errNotFound) { // pruned: its end is in the key's file
			return &operation{ID: k.Operation, State: k.State, CreatedAt: idTime(k.Operation), UpdatedAt: k.FinishedAt, FinishedAt: &k.FinishedAt}, nil
		} else if err != nil {
			return nil, s.unavailable(err)
		}
		return o, nil
	}
}

// wants is the image that a submission asks for; "" for a rollback without a retained revision.
func (sub submission) wants(r *record) string {
	switch {
	case sub.kind != "rollback":
		return sub.image
	case r.Rollback != nil:
		return r.Rollback.Image
	}
	return ""
}

// admission makes the checks between a new request and its acceptance, each when it is asked for, in the
// order that is part of the API. A nil error is a check that it passes. exhausted is how long the token of
// the request has had its share.
func (s *service) admission(sub submission, r *record, en enrolled, enErr error, exhausted time.Duration, room func() error) iter.Seq2[string, error] {
	checks := []struct {
		name string
		make func() error
	}{
		{"shutting_down", func() error {
			if s.closing() {
				return shuttingDown()
			}
			return nil
		}},
		{"enrollment", func() error {
			if enErr == nil {
				return nil
			}
			e := refuse("enrollment_invalid", "the enrollment of %s does not allow deployments", s.name).because(enErr)
			e.local = enErr.Error()
			return e
		}},
		{"repository", func() error {
			if sub.kind == "rollback" {
				switch {
				case r.Rollback == nil:
					return refuse("not_rollbackable", "there is no retained revision to go back to")
				case r.Current.ByRollback:
					return refuse("not_rollbackable", "the current revision is itself the outcome of a rollback; deploy a digest")
				}
			}
			if repository, _, _ := strings.Cut(sub.wants(r), "@"); repository != en.Repository {
				return refuse("repository_not_allowed", "%s may be deployed from %s only", s.name, en.Repository)
			}
			return nil
		}},
		{"suspended", func() error {
			switch {
			case r.Suspended != nil:
				return refuse("suspended", "%s is suspended: resume it first", s.name)
			case r.duty() == retiring:
				return s.isRetiring()
			}
			return nil
		}},
		{"held", func() error {
			if r.Held != nil {
				return refuse("held", "the service is held until what is still there is gone: %s", strings.Join(r.Held.Remains, "; "))
			}
			return nil
		}},
		{"barrier", func() error {
			if r.Barrier != nil {
				return barrierUp(r.Barrier)
			}
			return nil
		}},
		{"rollout", func() error {
			if r.active() != nil {
				return rolloutActive(r)
			}
			return nil
		}},
		{"generation", func() error {
			if sub.expected != r.Generation {
				e := refuse("stale_generation", "expected_generation is %d, the current generation is %d", sub.expected, r.Generation)
				e.CurrentGeneration = &r.Generation
				return e
			}
			return nil
		}},
		{"token", func() error {
			if exhausted > 0 {
				return tooMany(exhausted, "this token began %d deployments within an hour", tokenDeployments)
			}
			return nil
		}},
		{"room", func() error {
			switch err := room(); {
			case errors.Is(err, syscall.ENOSPC):
				return refuse("state_unavailable", "there is no room for the records of %s: free some space on the host, then deploy again", s.name).because(err)
			case err != nil:
				return s.unavailable(err)
			}
			return nil
		}},
	}
	return func(yield func(string, error) bool) {
		for _, c := range checks {
			if !yield(c.name, c.make()) {
				return
			}
		}
	}
}

// closing tells that Toad ends and takes nothing new.
func (s *service) closing() bool {
	s.live.Lock()
	defer s.live.Unlock()
	return s.live.closing
}

func shuttingDown() error { return refuse("shutting_down", "toad is shutting down; try again") }

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
	return refuse("state_unavailable", "the records of %s cannot be read or written now", s.name).because(err)
}

// requestRollback asks the operation to end. again tells that it is ending already.
func (s *service) requestRollback(id, actor string) (op *operation, again bool, err error) {
	if err := s.usable(); err != nil {
		return nil, false, err
	}
	s.mu.Lock()
	if _, err := s.bearer(actor); err != nil {
		s.mu.Unlock()
		return nil, false, err
	}
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
	}, event{Type: "rollback-requested", Actor: actor})
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
