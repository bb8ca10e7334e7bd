// rollout.go sequences every change to the host: the rollout of one service, its rollback, and
// recovery, which re-enters the same function. It sees systemd and Podman through two small
// interfaces and decides everything itself: no driver ever judges whether a status is good.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// units is what a rollout asks of the systemd user manager. Every method is bounded by its
// context and by the driver's own timeout, and may be used concurrently. A nil error of a
// mutating method means that systemd took the request, never that the host now is as wished.
type units interface {
	// Unit loads the unit and reads its properties in one round trip. A unit that does not exist is
	// no error: its LoadState is "not-found".
	Unit(ctx context.Context, name string) (unitStatus, error)
	// Processes lists what still lives in the unit's control group ("PID command").
	// An unloaded unit has none.
	Processes(ctx context.Context, name string) ([]string, error)
	// Hold keeps the unit loaded after it stops (a stopped unit is collected at once, and with it
	// all that could be known of its end) and collects its signals until release is called.
	Hold(ctx context.Context, name string) (signals *unitSignals, release func(), err error)
	// Start and Stop return once systemd has queued the job; what became of it is seen by looking.
	Start(ctx context.Context, name string) error
	Stop(ctx context.Context, name string) error
	// Reload returns when the manager has read all units again; a broken file is no error.
	Reload(ctx context.Context) error
	// ResetFailed clears a failed state and with it the start limit's memory.
	ResetFailed(ctx context.Context, name string) error
	// Run runs one host program to its end as a transient unit of that name, its standard output
	// and error in the named file of the host. It tells whether the exit status was 0; the error says
	// that it could not be run to its end.
	Run(ctx context.Context, name string, argv, env []string, output string) (ok bool, err error)
	// Incarnation tells one start of the user manager from another: its UserspaceTimestampMonotonic.
	Incarnation(ctx context.Context) (string, error)
}

// containers is what a rollout asks of Podman. The same bounds hold as for units.
type containers interface {
	// Containers lists every container, running or not, that has this name, or that the unit or the
	// service labels as its own (PODMAN_SYSTEMD_UNIT, toad.service).
	Containers(ctx context.Context, service, unit, name string) ([]container, error)
	// Container inspects one container by id or name; errNotFound if there is none.
	Container(ctx context.Context, nameOrID string) (container, error)
	// Remove removes the container with this full id by force; nil if there is none.
	Remove(ctx context.Context, id string) error
	// Image returns the id (config digest, "sha256:…") of the image with that reference; errNotFound.
	Image(ctx context.Context, ref string) (string, error)
	// Load stores the OCI archive that it reads, once: a broken stream is an error and never retried.
	Load(ctx context.Context, tar io.Reader) error
	// Starts counts Podman's own start events since then of containers of that name that carry the label of
	// that operation.
	Starts(ctx context.Context, name, operation string, since time.Time) (int, error)
	// Exists tells whether a network, secret or volume of that name exists.
	Exists(ctx context.Context, kind, name string) (bool, error)
}

// unitStatus is one look at a unit: properties of org.freedesktop.systemd1.Unit and .Service
// under their own names.
type unitStatus struct {
	LoadState, ActiveState, SubState, Result string
	Job                                      uint32 // 0: no job queued or running
	InvocationID                             string // 32 hex digits, "" when unloaded
	NRestarts                                uint32
	MainPID                                  uint32
	ControlGroup                             string
	SourcePath, FragmentPath                 string
	NeedDaemonReload                         bool
	ExecStart                                []string // argv of the last ExecStart= line
	// Dependents are the units that would start, stop or restart this one, or with it: the union of
	// TriggeredBy, RequiredBy, RequisiteOf, BoundBy, ConsistsOf, UpheldBy and WantedBy.
	Dependents []string
}

// stopped says what systemd itself says of a unit that has ended. It proves nothing alone:
// systemd says it while an unkillable process still lives.
func (u unitStatus) stopped() bool {
	return u.Job == 0 && (u.ActiveState == "inactive" && u.SubState == "dead" ||
		u.ActiveState == "failed" && u.SubState == "failed")
}

// unitSignals collects what systemd signals of one unit between two looks. Signals are never the
// truth, only faster than looking and more complete: a restart between two looks is seen in them.
type unitSignals struct {
	C chan struct{} // holds one token when there is something to take

	mu   sync.Mutex
	seen []unitStatus
}

func newUnitSignals() *unitSignals { return &unitSignals{C: make(chan struct{}, 1)} }

// put adds one signalled status. Only ActiveState, SubState, InvocationID, NRestarts and MainPID are
// set; one that differs in none of them from the last is dropped.
func (s *unitSignals) put(u unitStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.seen); n > 0 {
		l := s.seen[n-1]
		if l.ActiveState == u.ActiveState && l.SubState == u.SubState && l.InvocationID == u.InvocationID &&
			l.NRestarts == u.NRestarts && l.MainPID == u.MainPID {
			return
		}
		if n >= 4096 { // nobody reads: the looks have to make up for the oldest
			s.seen = append(s.seen[:0], s.seen[n/2:]...)
		}
	}
	s.seen = append(s.seen, u)
	select {
	case s.C <- struct{}{}:
	default:
	}
}

// take returns what was put since the last take, oldest first; nothing of a unit that is not held.
func (s *unitSignals) take() []unitStatus {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := s.seen
	s.seen = nil
	select {
	case <-s.C:
	default:
	}
	return seen
}

// container is one look at a container.
type container struct {
	ID, Name  string
	Status    string // Podman's word: created, running, paused, stopping, exited, …
	ConmonPID uint32
	ImageName string // as given at creation: repository@digest
	ImageID   string // config digest, "sha256:…"
	Unit      string // label PODMAN_SYSTEMD_UNIT
	Labels    map[string]string
	StartedAt time.Time
	Addresses map[string]string // network name → IP address
}

// rollout takes the operation from whatever state is on disk to a terminal one. Each block may run
// again after a kill, under the original deadlines: it looks at the host before it acts. It returns
// an error only when nothing more can be written or Toad is to stop; then nothing is decided, and the
// next start re-enters here.
func (s *service) rollout(ctx context.Context) error {
	// Disk: the operation, maybe the candidate revision. Host: untouched. A kill repeats the checks.
	if s.op().State == preparing {
		rev, info, err := s.prepare(ctx)
		if s.undecided(ctx, err) {
			return err
		} else if err != nil {
			return s.fail(err, nil) // the instance never noticed
		}
		old := time.Duration(rev.Enrollment.StopDeadline)
		if cur := s.rec.Load().Current; cur != nil {
			if r, err := s.data.revision(s.name, cur.Generation); err == nil {
				old = time.Duration(r.Enrollment.StopDeadline)
			}
		}
		if err := s.advance(activating, func(op *operation) {
			op.Candidate.ConfigID = info.ConfigID
			op.StopDeadline = s.after(old)
			op.RolloutDeadline = s.after(time.Duration(rev.Enrollment.Probation.RolloutDeadline))
			if d := time.Duration(rev.Enrollment.Probation.StartupDeadline); d > 0 {
				op.StartupDeadline = s.after(d)
			}
		}, event{Type: "activate", Detail: rev.Image}); err != nil {
			return err
		}
	}

	if s.op().State.terminal() {
		return nil
	}
	rev, err := s.data.revision(s.name, s.op().Candidate.Generation)
	if err != nil {
		return err // the record of an operation under way is gone: the service is closed
	}

	// Disk: the step. Host: the old instance is being stopped, or is gone; the candidate may have been
	// started. A kill re-enters at the step after proving again what it relies on.
	if s.op().State == activating {
		untouched := s.op().Step == ""
		switch err := s.activate(ctx, rev); {
		case s.undecided(ctx, err):
			return err
		case err == nil:
		case isCode(err, "termination_unconfirmed"):
			return s.fail(err, s.heldBy(s.rec.Load().Current, false))
		case untouched && s.op().Step == "":
			return s.fail(err, nil)
		default:
			if err := s.beginRollback(err); err != nil {
				return err
			}
		}
	}

	// Disk: every restart, the first readiness. Host: the candidate runs, restarts or has ended. A kill
	// begins with an empty window under the old deadline and count.
	if st := s.op().State; st == inProbation || st == promoting {
		switch err := s.probation(ctx, rev); {
		case s.undecided(ctx, err):
			return err
		case err == nil: // promoted
		default:
			if err := s.beginRollback(err); err != nil {
				return err
			}
		}
	}

	// Disk: the step and why. Host: the candidate is being stopped, or the target comes back. A kill
	// re-enters at the step; the target is started once.
	if s.op().State == rollingBack {
		switch h, err := s.rollBack(ctx, rev); {
		case s.undecided(ctx, err):
			return err
		case err == nil:
		default:
			return s.fail(err, h)
		}
	}
	return nil
}

// undecided tells that a step ended without an outcome: Toad is to stop, or the disk failed.
func (s *service) undecided(ctx context.Context, err error) bool {
	return err != nil && (ctx.Err() != nil || errors.Is(err, errStorage) || errors.Is(err, errCorrupt))
}

func isCode(err error, code string) bool {
	var c *codedError
	return errors.As(err, &c) && c.Code == code
}

// fail ends the operation, and holds the service in the same commit if an instance may still be there.
func (s *service) fail(err error, h *held) error {
	f := public(err)
	typ := "failed"
	if op := s.op(); op.State == rollingBack {
		f.Cause = op.Failure.Code
		f.Summary += "; it began with " + op.Failure.Summary
		if f.Code == "rollback_failed" {
			typ = "rollback-failed"
		}
	}
	events := []event{{Type: typ, Detail: f.Code}}
	if h != nil {
		h.Operation, h.Since = s.op().ID, s.now()
		h.Remains = remainsOf(err)
		events = append(events, event{Type: "held", Detail: strings.Join(h.Remains, "; ")})
	}
	s.log.Warn("operation failed", "operation", s.op().ID, "err", err)
	if err := s.commit(func(r *record) error {
		if r.Operation.State == rollingBack && r.Current != nil {
			r.Installed = false // what lies there may be the candidate's: the current revision's is put back, and not started
		}
		r.Operation.State, r.Operation.Failure, r.Held = hasFailed, &f, h
		return nil
	}, events...); err != nil {
		return err
	}
	s.say("failed", f.Code+": "+f.Summary)
	if h != nil {
		s.say("held")
	}
	if typ == "rollback-failed" || h != nil {
		s.alert(typ, "operation", s.op().ID, "code", f.Code, "summary", f.Summary)
	}
	return nil
}

// heldBy is the hold for an instance of that revision which may still be there.
func (s *service) heldBy(ref *promotedRevision, candidate bool) *held {
	h := &held{Candidate: candidate, Revision: s.op().Candidate}
	if !candidate && ref != nil {
		h.Revision = ref.reference
	}
	return h
}

// beginRollback persists why.
func (s *service) beginRollback(why error) error {
	f := public(why)
	s.log.Warn("rolling back", "operation", s.op().ID, "err", why)
	typ := "probation-failed"
	if s.op().State == activating || s.op().FirstReady == nil {
		typ = "startup-failed"
	}
	if err := s.advance(rollingBack, func(op *operation) { op.Failure = &f }, event{Type: typ, Detail: f.Code}); err != nil {
		return err
	}
	if p := s.op().Previous; p != nil {
		s.say("rolling_back", p.Generation, f.Code+": "+f.Summary)
	} else {
		s.say("rolling_back_none", f.Code+": "+f.Summary)
	}
	return nil
}

// prepare fetches and verifies everything while the old instance serves.
func (s *service) prepare(ctx context.Context) (*revision, imageInfo, error) {
	op := s.op()
	ctx, cancel := s.within(ctx, op.FetchDeadline)
	defer cancel()
	var rev *revision
	var info imageInfo
	var full error // the disk was, when it was last tried
	err := s.insist(ctx, op.FetchDeadline, func() (err error) {
		rev, info, err = s.prepareWithin(ctx, op)
		switch {
		case ctx.Err() != nil: // whatever came of it
		case errors.Is(err, syscall.ENOSPC) && s.stale() == nil:
			// The record is whole, and all that could not be written is written again from it.
			full = fmt.Errorf("%s: %w", err.Error(), syscall.ENOSPC)
			return full
		default:
			full = nil
		}
		return err
	})
	switch cause := context.Cause(ctx); {
	case err == nil || errors.Is(err, errStorage) && full == nil:
	case errors.Is(cause, errRequested):
		err = failed("requested", nil, s.op().RollbackBy)
	case full != nil && errors.Is(cause, context.DeadlineExceeded):
		err = failed("state_unavailable", full)
	case errors.Is(cause, context.DeadlineExceeded):
		var c *codedError
		if !errors.As(err, &c) {
			err = failed("interrupted", err, "the host did not answer in time")
		}
	}
	return rev, info, err
}

// insist does what may be done again for as long as the host does not answer and the deadline leaves
// time. A coded error is an answer.
func (s *service) insist(ctx context.Context, d *deadline, do func() error) error {
	for said := false; ; said = true {
		err := do()
		var c *codedError
		if err == nil || errors.As(err, &c) || s.undecided(ctx, err) || s.left(d) <= 0 || s.op().RollbackRequested && s.op().State != rollingBack {
			return err
		}
		s.log.Warn("trying again", "err", err)
		switch {
		case said:
		case errors.Is(err, syscall.ENOSPC):
			s.say("disk_full")
		default:
			s.say("host_not_answering")
		}
		if err := s.wait(ctx, time.Second); err != nil {
			return err
		}
	}
}

func (s *service) prepareWithin(ctx context.Context, op *operation) (*revision, imageInfo, error) {
	var info imageInfo
	rev, err := s.data.revision(s.name, op.Candidate.Generation)
	if err != nil || rev.Operation != op.ID {
		// Nothing was begun: the enrollment must be the one the request was accepted under.
		en, err := s.enrollment()
		if err != nil || en.Hash != op.Enrollment {
			return nil, info, failed("stale_enrollment", err)
		}
		rev = &revision{Version: recordVersion, Service: s.name, Generation: op.Candidate.Generation, Operation: op.ID,
			Image: op.Candidate.Image, Enrollment: en.enrollment, Container: en.ContainerName, Network: en.NetworkName, CreatedAt: s.now()}
		rev.unit = renderUnit(en, unitIdentity{DataID: s.data.id, Service: s.name, Generation: rev.Generation, Operation: op.ID, Image: rev.Image})
		if err := s.data.saveRevision(rev); err != nil {
			return nil, info, err
		}
	} else if err := s.data.syncRevision(rev); err != nil {
		return nil, info, err
	}
	if err := s.owns(ctx, rev); err != nil {
		return nil, info, err
	}
	if err := s.foreign(ctx, rev); err != nil {
		return nil, info, err
	}

	s.say("fetching", rev.Image)
	if err := makeDir(s.images()); err != nil {
		return nil, info, err
	}
	if info, err = s.host.fetch(ctx, s.images(), rev.Image, rev.Enrollment.ImageLimit); err != nil {
		return nil, info, err
	}
	s.say("fetched", info.Size)
	if missing := uncovered(info.Volumes, coveredVolumes(rev.unit)); len(missing) > 0 {
		return nil, info, failed("volume_not_covered", nil, strings.Join(missing, ", "))
	}
	ref := reference{Image: rev.Image, ConfigID: info.ConfigID}
	if _, err := s.ensureImage(ctx, ref); err != nil {
		return nil, info, err
	}
	s.checkTarget(ctx, op)
	if err := s.verifyUnit(ctx, rev); err != nil {
		return nil, info, err
	}
	if err := s.alone(ctx, rev); err != nil {
		return nil, info, err
	}
	if err := s.foreign(ctx, rev); err != nil { // a fetch takes long: look again
		return nil, info, err
	}
	if _, err := s.enrollment(); err != nil {
		return nil, info, failed("stale_enrollment", err)
	}
	if err := ctx.Err(); err != nil {
		return nil, info, err
	}
	s.say("verified")
	return rev, info, nil
}

// checkTarget sees that what a rollback would need is there, and repairs it while the registry is at
// hand. What cannot be repaired is said; a rollback to it will then fail, and say so.
func (s *service) checkTarget(ctx context.Context, op *operation) {
	if op.Previous == nil {
		return
	}
	t := op.Previous
	rev, err := s.data.revision(s.name, t.Generation)
	if err == nil {
		err = checkUnitText(rev.unit)
	}
	if err != nil {
		s.log.Warn("checking the rollback target", "err", err)
		s.say("target_damaged", t.Generation, "its unit's record is missing or damaged")
		return
	}
	if _, err = checkLayout(s.images(), t.digest()); err == nil {
		s.say("target_ready", t.Generation)
		return
	}
	s.log.Warn("checking the rollback target", "err", err)
	if _, err = s.host.fetch(ctx, s.images(), t.Image, rev.Enrollment.ImageLimit); err != nil {
		s.log.Warn("repairing the rollback target", "err", err)
		s.say("target_damaged", t.Generation, "its image is missing or damaged and could not be fetched")
		return
	}
	s.say("target_repaired", t.Generation)
}

// activate stops the old instance, proves that it is gone, and starts the candidate.
func (s *service) activate(ctx context.Context, rev *revision) error {
	unit := serviceName(rev.Enrollment.Unit)
	if err := s.hold(ctx, unit); err != nil {
		if s.op().Step == "" {
			return err
		}
		s.log.Warn("holding the unit", "err", err)
	}
	if s.op().Step == stepStart {
		// The start may have been made: whether it was, the host knows. A boot in between undid it.
		var took bool
		if err := s.insist(ctx, s.op().RolloutDeadline, func() (err error) {
			took, err = s.tookStart(ctx, rev)
			return err
		}); err != nil {
			if e := s.ended(rev, "it was not seen after its start"); e != nil && ctx.Err() == nil {
				return e
			}
			return err
		}
		if took {
			return s.advance(inProbation, nil)
		}
	}
	if s.op().Step == "" {
		if err := s.ended(rev, "it was not started yet"); err != nil {
			return err // nothing was touched, and there is no sense in beginning now
		}
		if s.left(s.op().StopDeadline) <= 0 {
			return failed("interrupted", nil, "the stop deadline passed before the stop was asked for")
		}
		if err := s.recordContainers(ctx, rev, stepStop); err != nil {
			return err
		}
	}
	if cur := s.rec.Load().Current; cur != nil {
		s.say("stopping", cur.Generation)
	} else {
		s.say("stopping_nothing")
	}
	s.setHealth(health{state: "unknown", observedAt: s.now()})
	if err := s.stopAndConfirm(ctx, rev, s.op().StopDeadline); err != nil {
		return err
	}
	s.setHealth(health{state: "stopped", observedAt: s.now()})
	s.say("terminated")
	if err := s.ended(rev, ""); err != nil {
		return err
	}
	by := s.op().RolloutDeadline
	if d := s.op().StartupDeadline; d != nil && s.left(d) < s.left(by) {
		by = d
	}
	if err := s.startCandidate(ctx, rev, by, "it was not started yet"); err != nil {
		return err
	}
	return s.advance(inProbation, nil)
}

// startCandidate puts the candidate in place and starts it. If that fails and the attempt has ended
// meanwhile, it says why: last is what was last known of the candidate.
func (s *service) startCandidate(ctx context.Context, rev *revision, by *deadline, last string) error {
	sctx, cancel := s.within(ctx, by)
	defer cancel()
	err := s.insist(sctx, by, func() error {
		return s.place(sctx, rev, s.op().Candidate, candidateForm(rev.unit))
	})
	if err == nil {
		err = s.start(sctx, rev)
	}
	if err != nil && ctx.Err() == nil && !errors.Is(err, errStorage) {
		return cmp.Or(s.ended(rev, last), err)
	}
	return err
}

// ended says why an attempt may not go on: a request, or a deadline that has passed.
func (s *service) ended(rev *revision, last string) error {
	op, p := s.op(), rev.Enrollment.Probation
	switch {
	case op.RollbackRequested:
		return failed("requested", nil, op.RollbackBy)
	case op.Restarts.Count > op.RestartBudget:
		return failed("restart_budget", nil, op.Restarts.Count, op.RestartBudget)
	case op.StartupDeadline != nil && op.FirstReady == nil && s.left(op.StartupDeadline) <= 0:
		return failed("startup_deadline", nil, time.Duration(p.StartupDeadline), last)
	case op.RolloutDeadline != nil && s.left(op.RolloutDeadline) <= 0:
		return failed("rollout_deadline", nil, time.Duration(p.StabilityWindow), time.Duration(p.RolloutDeadline), last)
	}
	return nil
}

// start persists the intent and lets systemd take the job. What becomes of it is seen by looking.
func (s *service) start(ctx context.Context, rev *revision) error {
	unit := serviceName(rev.Enrollment.Unit)
	var st unitStatus
	var boot string
	for try := 1; ; try++ { // a host that does not answer for a moment is no reason to give up here
		var err error
		if st, err = s.host.units.Unit(ctx, unit); err == nil {
			boot, err = s.bootNow(ctx)
		}
		if err == nil {
			break
		}
		if try == 5 || s.undecided(ctx, err) {
			return err
		}
		if err := s.wait(ctx, time.Second); err != nil {
			return err
		}
	}
	s.signals.take()
	now := s.now()
	if err := s.intend(stepStart, func(r *record) {
		op := r.Operation
		if op.State == rollingBack || op.StartedAt == nil {
			op.StartedAt = &now
		}
		op.Starts++
		op.Boot = boot
		op.Restarts = restarts{Count: op.Restarts.Count, Before: st.InvocationID}
		if op.State == rollingBack && op.RollbackDeadline == nil {
			op.RollbackDeadline = s.after(time.Duration(rev.Enrollment.Probation.RolloutDeadline))
		}
	}); err != nil {
		return err
	}
	// A start limit remembers starts of before; a unit that is not loaded has nothing to forget.
	if err := s.host.units.ResetFailed(ctx, unit); err != nil {
		s.log.Debug("resetting the failed state", "err", err)
	}
	s.say("starting", rev.Generation)
	// A call that was given up is carried out all the same once the manager answers: what became of it
	// is seen by looking, after it in the manager's queue.
	if err := s.host.units.Start(ctx, unit); err != nil && !errors.Is(err, errNoAnswer) {
		return failed("start_failed", err, "that the start was refused", "none")
	}
	s.say("started")
	return nil
}

// tookStart tells, after Toad was away between the intent of a start and the next commit, whether
// systemd had taken it. A start that a boot undid was not taken.
func (s *service) tookStart(ctx context.Context, rev *revision) (bool, error) {
	boot, err := s.bootNow(ctx)
	if err != nil {
		return false, err
	}
	if boot != s.op().Boot {
		return false, nil
	}
	return s.startedSince(ctx, rev, s.op().Restarts.Before, *s.op().StartedAt)
}

// probation watches the candidate to the promotion (nil), or to the reason for a rollback.
func (s *service) probation(ctx context.Context, rev *revision) error {
	if s.op().State == promoting { // Toad was away: the last look is worth nothing now
		if err := s.advance(inProbation, nil); err != nil {
			return err
		}
	}
	unit, e := serviceName(rev.Enrollment.Unit), &rev.Enrollment
	interval := time.Duration(e.Readiness.Interval)
	w := newWindow(e)
	last, said, saidAt := "it was not asked yet", "", time.Time{}
	asked := false      // Podman was asked for starts that were missed while Toad was away
	reconciled := false // the candidate was started in this boot
	// A start after a boot was meant and not seen: whether it was made, the host knows.
	meant := s.op().Step == stepStart && s.op().Restarts.Invocation == ""
	var givenUp *observation // because systemd signalled a change while the instance was asked
	unready := func(why string) {
		last = why
		if why != said || time.Since(saidAt) > 30*time.Second {
			said, saidAt = why, time.Now()
			s.say("not_ready", why)
		}
	}
	judge := func(o observation) (full bool) {
		wasBegun := !w.first.IsZero()
		full, lost := w.add(o)
		if lost != "" {
			s.say("window_reset", s.readyFor().Round(time.Millisecond), lost)
			said, saidAt = lost, time.Now()
		}
		s.setReadyFor(w.readyFor())
		s.setHealth(s.healthOf(o, s.op().Candidate))
		switch {
		case !o.ready():
			unready(o.reason)
		case !wasBegun || lost != "":
			said = ""
		}
		return full
	}
	for {
		begun := time.Now()
		if err := s.ended(rev, last); err != nil {
			return err
		}
		next := begun.Add(interval)
		st, err := s.look(ctx, unit)
		if err == nil && givenUp != nil {
			// Whatever it was going to answer, it is not this instance's any more if this one has changed.
			if b := givenUp.status; st.ActiveState != "active" || st.InvocationID != b.InvocationID || st.MainPID != b.MainPID {
				judge(observation{at: time.Now(), reason: changedWhileAsked})
			} else {
				unready(changedWhileAsked)
			}
			givenUp = nil
		}
		if err == nil && !asked {
			err = s.missedStarts(ctx, rev)
			asked = err == nil
		}
		if err == nil {
			if err = s.ended(rev, last); err != nil {
				return err
			}
		}
		if err == nil && (!reconciled || st.stopped()) {
			var boot string
			if boot, err = s.bootNow(ctx); err == nil && boot != s.op().Boot {
				if err := s.startAfterBoot(ctx, rev); err != nil {
					return err
				}
				w.reset()
				continue
			}
			if err == nil && meant {
				var took bool
				if took, err = s.startedSince(ctx, rev, s.op().Restarts.Before, s.op().UpdatedAt); err == nil && !took {
					if err := s.startAfterBoot(ctx, rev); err != nil {
						return err
					}
					w.reset()
					meant = false
					continue
				}
				meant = meant && err != nil
			}
			reconciled = err == nil
		}
		if err == nil && st.stopped() {
			if s.op().WasActive {
				return failed("unit_failed", nil, st.ActiveState, st.Result)
			}
			return failed("start_failed", nil, st.ActiveState, st.Result)
		}
		var o observation
		if err == nil {
			o, err = s.observe(ctx, rev)
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, errStorage):
			return err
		case errors.Is(err, errChanged):
			next = begun           // look again at once, at what was signalled
			if o.container != "" { // it was being asked
				givenUp = &o
			}
		case err != nil:
			s.log.Warn("observing", "err", err)
			o = observation{at: time.Now(), reason: "the host does not answer"}
			fallthrough
		default:
			begins := w.first
			full := judge(o)
			if !o.ready() {
				s.imageForStart(ctx, s.op().RolloutDeadline, o.status, s.op().Candidate)
			} else if w.first != begins {
				if err := s.sawReady(); err != nil {
					return err
				}
				s.say("ready", w.need)
			}
			if full {
				done, err := s.promote(ctx, rev, &w)
				if err != nil || done {
					return err
				}
				last = "the last look before promotion failed"
				continue
			}
			if !w.first.IsZero() && w.first.Add(w.need).Before(next) {
				next = w.first.Add(w.need)
			}
		}
		pause := time.Until(next)
		for _, d := range []*deadline{s.op().RolloutDeadline, s.op().StartupDeadline} {
			if d != nil && (d != s.op().StartupDeadline || s.op().FirstReady == nil) {
				pause = min(pause, s.left(d))
			}
		}
		if err := s.wait(ctx, pause); err != nil {
			return err
		}
	}
}

// seen is everything that was signalled of the unit, and then a look at it.
func (s *service) seen(ctx context.Context, unit string) (seen []unitStatus, st unitStatus, err error) {
	if err := s.hold(ctx, unit); err != nil {
		return nil, unitStatus{}, err
	}
	seen = s.signals.take()
	if st, err = s.host.units.Unit(ctx, unit); err == nil {
		seen = append(append(seen, s.signals.take()...), st)
	}
	return seen, st, err
}

// look reads the unit after everything that was signalled, counts restarts over both, and persists the
// count before it is used.
func (s *service) look(ctx context.Context, unit string) (unitStatus, error) {
	seen, st, err := s.seen(ctx, unit)
	op := s.op()
	n, active := op.Restarts, op.WasActive
	for _, u := range seen {
		n = n.add(u)
		active = active || u.ActiveState == "active" && n.Invocation != "" && u.InvocationID == n.Invocation
	}
	if n == op.Restarts && active == op.WasActive {
		return st, err
	}
	var events []event
	if n.Count > op.Restarts.Count {
		events = []event{{Type: "restart", Detail: fmt.Sprintf("%d of %d", n.Count, op.RestartBudget)}}
	}
	if cerr := s.commit(func(r *record) error {
		r.Operation.Restarts, r.Operation.WasActive = n, active
		return nil
	}, events...); cerr != nil {
		return st, cerr
	}
	if len(events) > 0 {
		s.say("restart", n.Count, op.RestartBudget)
	}
	return st, err
}

// missedStarts asks Podman's own event log for starts that happened while Toad was away and that
// systemd's counter no longer shows because somebody reset it.
func (s *service) missedStarts(ctx context.Context, rev *revision) error {
	op := s.op()
	if op.StartedAt == nil {
		return nil
	}
	since := *op.StartedAt // by the wall clock as it went then; Podman's log has it as it goes
	if d := op.RolloutDeadline; d.BootID == s.host.bootID() {
		since = since.Add(min(s.host.wall().Add(s.left(d)).Sub(d.At), 0))
	}
	n, err := s.host.containers.Starts(ctx, rev.Container, rev.Operation, since)
	if err != nil {
		return err
	}
	if n -= op.Starts; n <= op.Restarts.Count {
		return nil
	}
	if err := s.commit(func(r *record) error {
		r.Operation.Restarts.Count = n
		return nil
	}, event{Type: "restart", Detail: fmt.Sprintf("%d of %d", n, op.RestartBudget)}); err != nil {
		return err
	}
	s.say("restart", n, op.RestartBudget)
	return nil
}

// startAfterBoot reconciles a candidate whose host was booted during its probation: nothing of it
// counts. It is started again only if the original deadline leaves a whole window.
func (s *service) startAfterBoot(ctx context.Context, rev *revision) error {
	if err := s.stopAndConfirm(ctx, rev, s.op().RolloutDeadline); err != nil {
		if e := s.ended(rev, "the host was booted"); e != nil && isCode(err, "termination_unconfirmed") {
			return e // the rollback stops and confirms again, under its own deadline
		}
		return err
	}
	if s.left(s.op().RolloutDeadline) < time.Duration(rev.Enrollment.Probation.StabilityWindow) {
		s.say("boot_late")
		p := rev.Enrollment.Probation
		return failed("rollout_deadline", nil, time.Duration(p.StabilityWindow), time.Duration(p.RolloutDeadline), "the host was booted")
	}
	s.say("boot")
	return s.startCandidate(ctx, rev, s.op().RolloutDeadline, "the host was booted")
}

// errChanged ends an observation because systemd signalled a change of the unit, or a request came.
var errChanged = errors.New("the unit changed")

// changedWhileAsked is why an observation does not count that was given up for a change of the unit.
const changedWhileAsked = "it changed while it was asked"

// observe makes one observation, given up at once when systemd signals a change of the unit or a
// deadline passes, so that a slow answer never hides a restart.
func (s *service) observe(ctx context.Context, rev *revision) (observation, error) {
	octx, cancel := context.WithTimeout(ctx, max(s.left(s.op().RolloutDeadline), time.Millisecond))
	defer cancel()
	var signalled, woken bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-s.signals.C:
			signalled = true
		case <-s.wake: // a request
			woken = true
		case <-octx.Done():
		}
		cancel()
	}()
	o, err := observe(octx, s.host.units, s.host.containers, s.host.probe, rev, s.op().Candidate)
	cancel()
	<-done
	switch {
	case err != nil && signalled:
		return o, errChanged
	case err != nil && woken:
		return observation{}, errChanged
	case signalled || woken: // complete all the same; what it was is looked at next
		s.poke()
	}
	if err == nil && o.container != "" && !slices.Contains(s.rec.Load().Containers, o.container) && o.status.InvocationID == s.op().Restarts.Invocation {
		err = s.commit(func(r *record) error { r.addContainer(o.container); return nil })
	}
	return o, err
}

// sawReady persists the first readiness, which ends the startup deadline.
func (s *service) sawReady() error {
	if s.op().FirstReady != nil {
		return nil
	}
	return s.commit(func(r *record) error {
		now := s.now()
		r.Operation.FirstReady = &now
		return nil
	})
}

func (s *service) setReadyFor(d time.Duration) {
	s.live.Lock()
	s.live.readyFor = d
	s.live.Unlock()
}

func (s *service) readyFor() time.Duration {
	s.live.Lock()
	defer s.live.Unlock()
	return s.live.readyFor
}

// promote looks once more and makes the candidate the current revision in one commit. It returns false
// without an error if that look failed: probation then goes on with an empty window.
func (s *service) promote(ctx context.Context, rev *revision, w *window) (bool, error) {
	ready := w.readyFor()
	if err := s.advance(promoting, nil); err != nil {
		return false, err
	}
	var o observation
	var err error
	for try := 1; try == 1 || errors.Is(err, errChanged) && try <= 5; try++ { // what changed may be nothing of its identity
		if _, err = s.look(ctx, serviceName(rev.Enrollment.Unit)); err != nil {
			break
		}
		if err := s.ended(rev, "ready, and about to be promoted"); err != nil {
			return false, err
		}
		o, err = s.observe(ctx, rev)
	}
	if ctx.Err() != nil || errors.Is(err, errStorage) {
		return false, err
	}
	why := o.reason
	switch {
	case err != nil:
		why = "the host does not answer"
		if errors.Is(err, errChanged) {
			why = "the unit changed"
		}
	case why == "" && (o.invocation != w.invocation || o.container != w.container):
		why = "another instance answers"
	case why == "" && o.invocation != s.op().Restarts.Invocation:
		why = "it restarted"
	}
	if why != "" {
		w.reset()
		s.setReadyFor(0)
		s.say("promoting_again", why)
		return false, s.advance(inProbation, nil)
	}
	// The one commit that makes it true. Before it a kill goes back to probation; after it the
	// operation is promoted, and the unit's [Install] and the archive follow from the record.
	err = s.commit(func(r *record) error {
		op, now := r.Operation, s.now()
		if op.RollbackRequested {
			return errRequested
		}
		r.Rollback = r.Current
		r.Current = &promotedRevision{reference: op.Candidate, PromotedAt: now, ByRollback: op.Kind == "rollback"}
		r.Generation = op.Candidate.Generation
		r.Installed = false
		op.ReadySeconds = seconds(ready)
		r.Watch = restarts{Invocation: op.Restarts.Invocation, NRestarts: op.Restarts.NRestarts, Pending: op.Restarts.Pending}
		op.State = promoted
		return nil
	}, event{Type: "promote", Detail: rev.Image})
	if errors.Is(err, errRequested) {
		return false, failed("requested", nil, s.op().RollbackBy)
	} else if err != nil {
		return false, err
	}
	s.log.Info("state", "operation", s.op().ID, "generation", rev.Generation, "state", promoted)
	s.say("stable", ready.Round(time.Millisecond))
	s.say("promoted", rev.Generation)
	return true, nil
}

// rollBack ends the attempt: back to the target, once, or to nothing where there is none. The hold is
// set when an instance may still be there.
func (s *service) rollBack(ctx context.Context, cand *revision) (*held, error) {
	op := s.op()
	if op.Previous == nil {
		if err := s.stopCandidate(ctx, cand); err != nil {
			return s.heldIf(err), err
		}
		if err := s.intend(stepWrite, nil); err != nil {
			return nil, err
		}
		err := s.removeUnit(ctx, cand)
		if s.undecided(ctx, err) {
			return nil, err
		} else if err == nil {
			s.say("unit_removed")
		}
		return nil, failed("no_rollback_target", err)
	}
	t := op.Previous.reference
	broken := func(err error, what string) (*held, error) {
		if s.undecided(ctx, err) {
			return nil, err
		}
		return s.heldIf(err), failed("rollback_failed", err, t.Generation, what)
	}
	rev, err := s.data.revision(s.name, t.Generation)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errCorrupt) {
			err = failed("interrupted", nil, "the target's record is missing or damaged") // nothing can be started: stop the candidate all the same
			if serr := s.stopCandidate(ctx, cand); serr != nil {
				err = serr
			}
		}
		return broken(err, "its record is missing or damaged")
	}
	s.tryHold(ctx, rev)

	started := op.Step == stepVerify
	if op.Step == stepStart {
		// The start may have been made; it is made again only if a boot undid it.
		if err := s.insist(ctx, op.RollbackDeadline, func() (err error) {
			started, err = s.tookStart(ctx, rev)
			return err
		}); err != nil {
			return broken(err, "the host does not answer")
		}
	}
	if op.Step == stepVerify {
		var boot string
		if err := s.insist(ctx, op.RollbackDeadline, func() (err error) {
			boot, err = s.bootNow(ctx)
			return err
		}); err != nil {
			return broken(err, "the host does not answer")
		}
		started = boot == op.Boot // else it is there, booted with [Install], or may be started again
	}
	there := false
	if !started {
		// Whoever runs is not stopped because nobody answers for a moment.
		silence := s.after(time.Duration(cand.Enrollment.StopDeadline))
		err := s.insist(ctx, silence, func() (err error) {
			there, err = s.runs(ctx, rev, t)
			return err
		})
		if s.undecided(ctx, err) {
			return nil, err
		} else if err != nil {
			s.log.Warn("looking whether the target runs", "err", err)
		}
	}
	switch {
	case started:
	case there:
		s.say("already_there", t.Generation)
		if err := s.verifying(ctx, rev); err != nil {
			return broken(err, "the host does not answer")
		}
	default:
		if err := s.stopCandidate(ctx, cand); err != nil {
			return broken(err, "the candidate could not be proven dead")
		}
		if err := s.placeTarget(ctx, rev, t); err != nil {
			return broken(err, "its image or unit could not be put in place")
		}
		if err := s.start(ctx, rev); err != nil {
			return broken(err, "systemd did not take its start")
		}
	}
	if s.op().Step != stepVerify {
		if err := s.verifying(ctx, rev); err != nil {
			return broken(err, "the host does not answer")
		}
	}
	if why, err := s.seenReady(ctx, rev, t); err != nil {
		return broken(err, "the host does not answer")
	} else if why != "" {
		return broken(nil, why)
	}
	s.say("restored", t.Generation)
	if err := s.advance(rolledBack, nil, event{Type: "rollback", Detail: s.op().Failure.Code}); err != nil {
		return nil, err
	}
	s.say("rolled_back", t.Generation)
	return nil, nil
}

// heldIf holds the service for the candidate if its termination was not confirmed.
func (s *service) heldIf(err error) *held {
	if isCode(err, "termination_unconfirmed") {
		return s.heldBy(nil, true)
	}
	return nil
}

// stopCandidate stops whatever of the unit runs. Before the target's start no time can run out: each
// entry has the whole stop deadline.
func (s *service) stopCandidate(ctx context.Context, cand *revision) error {
	s.tryHold(ctx, cand)
	if s.op().Step == "" {
		if err := s.recordContainers(ctx, cand, stepStop); errors.Is(err, errStorage) || ctx.Err() != nil {
			return err
		} else if err != nil { // the host does not answer: stop all the same
			if err := s.intend(stepStop, nil); err != nil {
				return err
			}
		}
	}
	s.say("stopping", cand.Generation)
	err := s.stopAndConfirm(ctx, cand, s.after(time.Duration(cand.Enrollment.StopDeadline)))
	s.keepOutput(ctx, cand)
	if err != nil {
		return err
	}
	s.setHealth(health{state: "stopped", observedAt: s.now()})
	s.say("terminated")
	return nil
}

// placeTarget puts the target's bytes and unit in place. What the host refuses is tried five times;
// where nobody answers, it is tried for as long as a start would be given.
func (s *service) placeTarget(ctx context.Context, rev *revision, t reference) error {
	silence := s.after(time.Duration(rev.Enrollment.Probation.RolloutDeadline))
	for refused := 0; ; {
		err := s.insist(ctx, silence, func() error {
			pctx, cancel := context.WithTimeout(ctx, time.Duration(rev.Enrollment.FetchDeadline)) // a load has no bound of its own
			defer cancel()
			return s.place(pctx, rev, t, rev.unit)
		})
		if refused++; err == nil || s.undecided(ctx, err) || refused == 5 || s.left(silence) <= 0 {
			return err
		}
		if isCode(err, "unit_not_owned") || isCode(err, "digest_mismatch") {
			return err
		}
		s.log.Warn("putting the target in place", "err", err)
		if err := s.wait(ctx, time.Second); err != nil {
			return err
		}
	}
}

// verifying persists that the target's start was taken, or that it ran already; its deadline begins
// with the start, or here if there was none to make.
func (s *service) verifying(ctx context.Context, rev *revision) error {
	boot, err := s.bootNow(ctx)
	if err != nil {
		boot = s.op().Boot
	}
	return s.intend(stepVerify, func(r *record) {
		if r.Operation.RollbackDeadline == nil {
			r.Operation.RollbackDeadline = s.after(time.Duration(rev.Enrollment.Probation.RolloutDeadline))
		}
		r.Operation.Boot = boot
	})
}

// seenReady waits until the target was seen ready once; otherwise it says why it will not be.
func (s *service) seenReady(ctx context.Context, rev *revision, t reference) (string, error) {
	unit := serviceName(rev.Enrollment.Unit)
	last := "it was not asked yet"
	for {
		left := s.left(s.op().RollbackDeadline)
		if left <= 0 {
			return "it was not seen ready within " + time.Duration(rev.Enrollment.Probation.RolloutDeadline).String() + "; last: " + last, nil
		}
		octx, cancel := context.WithTimeout(ctx, left)
		o, err := observe(octx, s.host.units, s.host.containers, s.host.probe, rev, t)
		cancel()
		if err != nil {
			o = observation{reason: "the host does not answer"}
		}
		s.setHealth(s.healthOf(o, t))
		switch {
		case ctx.Err() != nil:
			return "", ctx.Err()
		case err != nil:
			s.log.Warn("observing the target", "err", err)
		case o.ready():
			return "", s.commit(func(r *record) error {
				r.addContainer(o.container)
				r.Watch = restarts{Count: r.Watch.Count, Invocation: o.status.InvocationID, NRestarts: o.status.NRestarts}
				return nil
			})
		case o.status.stopped():
			st, err := s.host.units.Unit(ctx, unit) // a start just taken may not show yet
			if err == nil && st.stopped() {
				return fmt.Sprintf("its unit ended: systemd says %s, result %s", st.ActiveState, st.Result), nil
			}
		}
		if o.reason != "" {
			last = o.reason
			s.imageForStart(ctx, s.op().RollbackDeadline, o.status, t)
		}
		if err := s.wait(ctx, min(left, time.Duration(rev.Enrollment.Readiness.Interval))); err != nil {
			return "", err
		}
		s.signals.take()
	}
}
