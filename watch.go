// watch.go looks after a service between rollouts: it finishes what follows from the last commit,
// tells what happens to the promoted revision, and keeps the rollback target restorable. It never
// rolls back: after promotion a failure is systemd's to restart and an operator's to judge.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"
)

// How often what cannot be signalled is looked at. A request to Podman wakes a service of 50 MB that
// then stays for five seconds, so a quiet Toad asks systemd and the instance only.
const (
	watchInterval     = 10 * time.Second // the unit, and the instance itself
	installInterval   = 10 * time.Second // finishing a promotion
	retentionInterval = 5 * time.Minute  // layout, unit, networks, secrets, volumes, image
	unhealthyAfter    = 30 * time.Second // lasting unreadiness
)

// watch runs until there is something to roll out, and returns an error only for the disk's sake.
func (s *service) watch(ctx context.Context) error {
	if err := s.settle(); err != nil {
		return err
	}
	var nextInstall, nextRetention, unreadySince time.Time
	var known identity // whose address is asked without asking Podman again
	lost := false
	for {
		if err := s.stale(); err != nil {
			return err
		}
		if s.rec.Load().duty() != watching {
			return nil
		}
		cur := s.rec.Load().Current
		if cur == nil {
			s.setHealth(health{state: s.withoutRevision(ctx), observedAt: s.now()})
			if err := s.wait(ctx, time.Minute); err != nil {
				return err
			}
			continue
		}
		rev, err := s.data.revision(s.name, cur.Generation)
		if err != nil {
			return err
		}
		if !s.rec.Load().Installed && !time.Now().Before(nextInstall) {
			nextInstall = time.Now().Add(installInterval)
			ictx, cancel := s.whileIdle(ctx, watching)
			err := s.install(ictx, rev)
			cancel()
			if s.undecided(ctx, err) {
				return err
			} else if err != nil && s.rec.Load().duty() == watching {
				s.alert("the promoted unit could not be put in place; it is tried again", "err", err)
			}
		}
		if !time.Now().Before(nextRetention) {
			nextRetention = time.Now().Add(retentionInterval)
			rctx, cancel := s.whileIdle(ctx, watching)
			err := s.retention(rctx)
			cancel()
			if err != nil {
				return err
			}
			continue // a submission ends it
		}

		alerted := s.unhealthy == cur.Generation
		st, lookErr := s.watchUnit(ctx, rev)
		if errors.Is(lookErr, errStorage) || ctx.Err() != nil {
			return lookErr
		}
		if gone := lookErr == nil && st.LoadState == "not-found"; gone && !lost && s.rec.Load().Installed {
			// A running instance runs on, but neither a crash nor a boot would start it again.
			lost = true
			s.alert("unit-lost", "unit", rev.Enrollment.Unit)
			if err := s.tell("unit-lost", rev.Enrollment.Unit+" is not loaded any more: its file, or another one in its directory, cannot be read or is gone"); err != nil {
				return err
			}
		} else if lookErr == nil && !gone {
			lost = false
		}
		h, why := s.runtimeHealth(ctx, rev, cur.reference, st, lookErr, &known)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.setHealth(h)
		switch {
		case h.ready && alerted:
			s.unhealthy = 0
			if err := s.tell("healthy", "ready again"); err != nil {
				return err
			}
			fallthrough
		case h.ready:
			unreadySince = time.Time{}
		case unreadySince.IsZero():
			unreadySince = time.Now()
		case !alerted && (time.Since(unreadySince) >= unhealthyAfter || h.state == "failed"):
			s.unhealthy = cur.Generation
			s.alert("unhealthy", "state", h.state, "why", why)
			if err := s.tell("unhealthy", h.state+": "+why); err != nil {
				return err
			}
			if lookErr == nil { // it may be that its image is gone
				rctx, cancel := s.whileIdle(ctx, watching)
				err := s.restoreImage(rctx, cur.reference)
				cancel()
				if err != nil {
					return err
				}
			}
		}
		pause := watchInterval
		if !h.ready { // whoever has just been started or has just failed is looked at more closely
			pause = max(time.Second, time.Duration(rev.Enrollment.Readiness.Interval))
		}
		if !s.rec.Load().Installed {
			pause = min(pause, max(time.Until(nextInstall), 0))
		}
		if err := s.wait(ctx, pause); err != nil {
			return err
		}
	}
}

// whileIdle is a context that ends when an operation is accepted, or the service has another duty.
func (s *service) whileIdle(ctx context.Context, now duty) (context.Context, context.CancelFunc) {
	return s.step(ctx, func() error {
		if s.rec.Load().duty() != now {
			return errSubmitted
		}
		return nil
	})
}

// tell commits an event of the running service.
func (s *service) tell(typ, detail string) error {
	return s.commit(unchanged, event{Type: typ, Detail: detail, Operation: s.currentOperation()})
}

// currentOperation is the operation that made the current revision.
func (s *service) currentOperation() string {
	if r := s.rec.Load(); r != nil && r.Current != nil {
		return r.Current.Operation
	}
	return ""
}

func (s *service) setHealth(h health) {
	s.live.Lock()
	s.live.health = h
	s.live.Unlock()
}

// healthOf is what one observation of a rollout says of an instance that is to run as ref. What runs is named
// only when it is ready, and so was identified.
func (s *service) healthOf(o observation, ref reference) health {
	h := health{state: "unknown", observedAt: s.now()}
	switch st := o.status; {
	case o.ready():
		cur := s.rec.Load().Current
		h.state, h.ready, h.digest, h.current = "running", true, ref.digest(), cur != nil && cur.Generation == ref.Generation
	case st.ActiveState == "active":
		h.state = "running"
	case st.ActiveState == "failed" && st.stopped():
		h.state = "failed"
	case st.ActiveState != "" && st.stopped():
		h.state = "stopped"
	case st.ActiveState != "":
		h.state = "starting"
	}
	return h
}

// settle writes what follows from the last commit: the archive and key of an ended operation, and the
// layout without what is no longer kept. All of it can be done again.
func (s *service) settle() error {
	r := s.rec.Load()
	if r.Operation != nil && r.active() == nil {
		if err := s.data.withReserve(func() error { return s.data.archive(s.name, r.Operation) }); err != nil {
			return err
		}
		s.mu.Lock()
		s.archived = r.Operation.ID
		s.mu.Unlock()
	}
	if _, err := os.Stat(s.images()); err == nil && r.Held == nil {
		keep := map[string]string{}
		for _, p := range []*promotedRevision{r.Current, r.Rollback} {
			if p != nil {
				keep[p.digest()] = p.Image
			}
		}
		if err := s.data.withReserve(func() error { return pruneLayout(s.images(), keep) }); errors.Is(err, errStorage) {
			return err
		} else if err != nil {
			s.log.Warn("pruning the image layout", "err", err)
		}
	}
	return s.data.prune(r, s.now())
}

// install puts the promoted form of the current unit in place: only after the commit, or a boot could
// start what was not promoted. The running instance is not touched by it.
func (s *service) install(ctx context.Context, rev *revision) error {
	if err := s.hold(ctx, serviceName(rev.Enrollment.Unit)); err != nil {
		return err
	}
	if err := s.writeUnit(ctx, rev, rev.unit); err != nil {
		return err
	}
	st, err := s.host.units.Unit(ctx, serviceName(rev.Enrollment.Unit))
	if err != nil {
		return err
	}
	boot, err := s.bootNow(ctx)
	if err != nil {
		return err
	}
	// The current revision's own operation: a later one may have failed before it touched anything. One that
	// could not put the current revision back has said so, and nothing starts it but a boot or an operator.
	op := s.op()
	tried := false
	if id := s.currentOperation(); op == nil || op.ID != id {
		tried = op != nil && op.reached(rollingBack)
		if op, err = s.data.operation(s.name, id); errors.Is(err, errCorrupt) {
			s.log.Warn("reading the operation of the current revision", "err", err) // as if it were not there: fsck says it
			op = nil
		} else if err != nil && !errors.Is(err, errNotFound) {
			return err
		}
	}
	if st.stopped() && !tried && op != nil && op.State == promoted && op.Boot != boot {
		// A boot fell between the promotion and this: the candidate's form starts nothing at boot. What
		// is started is the current revision; it is no rollout.
		if err := s.stopAndConfirm(ctx, rev, s.after(time.Duration(rev.Enrollment.StopDeadline))); err != nil {
			return err
		}
		if _, err := s.ensureImage(ctx, s.rec.Load().Current.reference); err != nil {
			return err
		}
		if err := s.commit(func(r *record) error { r.Watch.Before, r.Watch.Invocation = st.InvocationID, ""; return nil }); err != nil {
			return err
		}
		if s.rec.Load().down() {
			return errSubmitted
		}
		if err := s.host.units.Start(ctx, serviceName(rev.Enrollment.Unit)); err != nil && !errors.Is(err, errNoAnswer) {
			return err
		}
	}
	if err := s.commit(func(r *record) error {
		if r.down() {
			return errSubmitted
		}
		r.Installed = true
		return nil
	}); err != nil {
		return err
	}
	s.say("installed")
	return nil
}

// watchUnit counts restarts since the promotion from signals and a look, and tells each.
func (s *service) watchUnit(ctx context.Context, rev *revision) (unitStatus, error) {
	seen, st, err := s.seen(ctx, serviceName(rev.Enrollment.Unit))
	before := s.rec.Load().Watch
	n := before
	for _, u := range seen {
		n = n.add(u)
	}
	if n == before {
		return st, err
	}
	var events []event
	if n.Count > before.Count {
		if time.Since(s.restartTold) >= time.Minute { // of a crash loop the journal has a line a minute
			s.restartTold = time.Now()
			s.alert("restart", "restarts since promotion", n.Count)
		}
		events = []event{{Type: "restart", Operation: s.currentOperation(), Detail: fmt.Sprintf("%d since promotion", n.Count)}}
	}
	if cerr := s.commit(func(r *record) error { r.Watch = n; return nil }, events...); cerr != nil {
		return st, cerr
	}
	return st, err
}

// runtimeHealth says how the current revision is now. As long as the unit's invocation is the one whose
// container was identified, the instance is asked without waking Podman.
func (s *service) runtimeHealth(ctx context.Context, rev *revision, ref reference, st unitStatus, lookErr error, known *identity) (health, string) {
	h := health{state: "unknown", observedAt: s.now()}
	switch {
	case lookErr != nil:
		return h, "systemd does not answer"
	case st.LoadState == "not-found" && st.ActiveState != "active":
		h.state = "stopped"
		return h, "its unit is not loaded"
	case st.LoadState != "not-found" && !s.ours(st, rev.Enrollment.Unit):
		h.state = "foreign"
		return h, "another unit has its name"
	case st.ActiveState == "failed" && st.Job == 0 && st.SubState == "failed":
		h.state = "failed"
		return h, "systemd says failed, result " + st.Result
	case st.ActiveState == "inactive" && st.Job == 0:
		h.state = "stopped"
		return h, "the unit is inactive"
	case st.ActiveState != "active":
		h.state = "starting"
		return h, "the unit is " + st.ActiveState
	}
	h.state = "running"
	if known.invocation != st.InvocationID || known.conmon != st.MainPID || known.address == "" {
		id, _, err := identify(ctx, s.host.units, s.host.containers, rev, ref)
		var why notReady
		switch {
		case errors.As(err, &why):
			h.state = "starting"
			return h, string(why)
		case err != nil:
			h.state = "unknown"
			return h, "Podman does not answer"
		}
		*known = id
	}
	h.current, h.digest = true, ref.digest()
	pctx, cancel := context.WithTimeout(ctx, time.Duration(rev.Enrollment.Readiness.Timeout))
	err := s.host.probe(pctx, target{known.address, rev.Enrollment.Readiness})
	cancel()
	if err != nil {
		*known = identity{} // it may have moved: look properly next time
		return h, err.Error()
	}
	if now, err := s.host.units.Unit(ctx, serviceName(rev.Enrollment.Unit)); err != nil || now.InvocationID != known.invocation {
		return h, "it restarted while it answered"
	}
	h.ready = true
	return h, ""
}

// withoutRevision says what is there of a service that has none.
func (s *service) withoutRevision(ctx context.Context) string {
	en, err := s.enrollment()
	if err != nil {
		return "stopped"
	}
	st, err := s.host.units.Unit(ctx, serviceName(en.Unit))
	switch {
	case err != nil:
		return "unknown"
	case st.ActiveState == "active" || st.ActiveState == "activating":
		return "foreign"
	}
	return "stopped"
}

// restoreImage loads the current revision's image back when somebody removed it from Podman: a unit
// that systemd restarts pulls it otherwise, and cannot with the registry away.
func (s *service) restoreImage(ctx context.Context, ref reference) error {
	loaded, err := s.ensureImage(ctx, ref)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		s.alert("the current revision's image cannot be loaded into Podman", "err", err)
		return nil
	}
	if loaded {
		return s.tell("retention-restored", "the current revision's image had gone from Podman and was loaded again")
	}
	return nil
}

// retention sees whether the current and the retained revision could be restored now, repairs what it
// can, and tells what changed.
func (s *service) retention(ctx context.Context) error {
	r := s.rec.Load()
	var ofCurrent []wireProblem
	s.live.Lock()
	old, oldCurrent, checked := s.live.problems, s.live.ofCurrent, s.live.checked
	_, _, looked := s.live.restorable(r)
	s.live.Unlock()
	asked := true // everything could be asked
	if r.Current != nil {
		var err error
		if ofCurrent, err = s.problemsOf(ctx, r.Current, oldCurrent, &asked); err != nil {
			return err
		}
		if !r.down() { // else it is loaded when it is started
			if err := s.restoreImage(ctx, r.Current.reference); err != nil {
				return err
			}
		}
	}
	var problems []wireProblem
	if r.Rollback != nil {
		var err error
		if problems, err = s.problemsOf(ctx, r.Rollback, old, &asked); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return nil // what could not be asked or fetched is no problem yet
	}
	s.live.Lock()
	s.live.problems, s.live.ofCurrent, s.live.checked = problems, ofCurrent, looked || asked
	s.live.checkedOf = retainedBy(r)
	s.live.Unlock()
	lost := len(old) > 0
	if !checked { // by this Toad
		e := s.lastTold("retention-lost", "retention-restored")
		lost = e.Type == "retention-lost"
		if lost && len(problems) > 0 && e.Detail == problems[0].Summary {
			return nil
		}
	}
	switch {
	case checked && slices.Equal(old, problems), len(problems) == 0 && !lost:
	case len(problems) == 0 && !asked:
	case len(problems) == 0:
		return s.tell("retention-restored", "the retained rollback can be restored again")
	default:
		s.alert("retention-lost", "problems", problems)
		return s.tell("retention-lost", problems[0].Summary)
	}
	return nil
}

// retainedBy is which revisions a record names as current and retained.
func retainedBy(r *record) (generations [2]int64) {
	for i, p := range []*promotedRevision{r.Current, r.Rollback} {
		if p != nil {
			generations[i] = p.Generation
		}
	}
	return generations
}

// restorable is what was last seen of the retained and the current revision of r; looked tells whether they were
// looked at. The caller holds the lock.
func (l *live) restorable(r *record) (problems, ofCurrent []wireProblem, looked bool) {
	if r == nil || !l.checked || l.checkedOf != retainedBy(r) {
		return nil, nil, false
	}
	return l.problems, l.ofCurrent, true
}

// problemsOf lists what a revision would miss if it had to be started now. What Podman does not say is as
// it was before, and asked becomes false.
func (s *service) problemsOf(ctx context.Context, p *promotedRevision, before []wireProblem, asked *bool) ([]wireProblem, error) {
	var problems []wireProblem
	bad := func(code, format string, a ...any) {
		problems = append(problems, wireProblem{Code: code, Summary: fmt.Sprintf(format, a...)})
	}
	if _, err := checkLayout(s.images(), p.digest()); err != nil {
		s.log.Warn("checking the layout", "generation", p.Generation, "err", err)
		code, word := "image_missing", "missing"
		if errors.Is(err, errDamaged) {
			code, word = "image_damaged", "damaged"
		}
		if fetched := s.refetch(ctx, p); ctx.Err() != nil {
			return nil, nil
		} else if !fetched {
			bad(code, "the retained image of generation %d is %s and could not be fetched again", p.Generation, word)
		} else if err := s.tell("retention-restored", fmt.Sprintf("the retained image of generation %d was %s and was fetched again", p.Generation, word)); err != nil {
			return nil, err
		}
	}
	rev, err := s.data.revision(s.name, p.Generation)
	if err != nil || checkUnitText(rev.unit) != nil {
		bad("unit_missing", "the unit of generation %d is missing or damaged", p.Generation)
		return problems, nil
	}
	networks, secrets, volumes := referenced(rev.unit, s.host.quadlets)
	for _, k := range []struct {
		kind, code string
		names      []string
	}{{"network", "network_missing", networks}, {"secret", "secret_missing", secrets}, {"volume", "volume_missing", volumes}} {
		for _, name := range k.names {
			missing := wireProblem{k.code, fmt.Sprintf("the %s %s that generation %d uses is missing", k.kind, name, p.Generation)}
			ok, err := s.host.containers.Exists(ctx, k.kind, name)
			if err != nil {
				*asked = false
				ok = !slices.Contains(before, missing)
			}
			if !ok {
				problems = append(problems, missing)
			}
		}
	}
	return problems, nil
}

// refetch repairs a layout from the registry, within the fetch deadline and at most a minute.
func (s *service) refetch(ctx context.Context, p *promotedRevision) bool {
	rev, err := s.data.revision(s.name, p.Generation)
	if err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, min(time.Minute, time.Duration(rev.Enrollment.FetchDeadline)))
	defer cancel()
	if _, err := s.host.fetch(ctx, s.images(), p.Image, rev.Enrollment.ImageLimit); err != nil {
		s.log.Warn("fetching a retained image again", "err", err)
		return false
	}
	return true
}

// unhold goes on stopping and confirming while the service is held. Once the instance is gone, the
// current revision is started again, once, if it was the one being stopped; after a candidate its unit
// is replaced by the target's and not started.
func (s *service) unhold(ctx context.Context) error {
	h := s.rec.Load().Held
	rev, err := s.data.revision(s.name, h.Revision.Generation)
	if err != nil {
		return err
	}
	s.tryHold(ctx, rev)
	if h.StartedAt != nil {
		// The start of the current revision was meant, and maybe made.
		took, err := s.startedSince(ctx, rev, s.rec.Load().Watch.Before, *h.StartedAt)
		if err != nil {
			s.log.Warn("looking for the start after a hold", "err", err)
			return s.wait(ctx, 5*time.Second)
		}
		if took {
			return s.commit(func(r *record) error { r.Held, r.Resume, r.Installed = nil, nil, !r.down(); return nil },
				event{Type: "held", Operation: h.Operation, Detail: "released: the current revision was started again"})
		}
	}
	s.setHealth(health{state: "held", observedAt: s.now()})
	err = s.stopAndConfirm(ctx, rev, s.after(time.Duration(rev.Enrollment.StopDeadline)))
	if s.undecided(ctx, err) {
		return err
	}
	if err != nil {
		if now := remainsOf(err); !slices.Equal(now, h.Remains) {
			if err := s.commit(func(r *record) error { r.Held.Remains = now; return nil }); err != nil {
				return err
			}
		}
		return s.wait(ctx, 5*time.Second)
	}
	if err := s.afterHold(ctx, h); err != nil {
		if s.undecided(ctx, err) {
			return err
		}
		s.log.Warn("putting the current revision back after a hold", "err", err)
		return s.wait(ctx, 5*time.Second)
	}
	return nil
}

// afterHold runs once termination is confirmed. The start is meant durably before it is made, and the
// hold is lifted after it, so that a kill in between neither loses nor repeats it.
func (s *service) afterHold(ctx context.Context, h *held) error {
	lift := func(detail string) error {
		return s.commit(func(r *record) error {
			r.Held = nil
			r.Installed = r.Current != nil && !r.down()
			return nil
		}, event{Type: "held", Operation: h.Operation, Detail: "released: " + detail})
	}
	cur := s.rec.Load().Current
	if cur == nil {
		rev, err := s.data.revision(s.name, h.Revision.Generation)
		if err != nil {
			return err
		}
		if err := s.removeUnit(ctx, rev); err != nil {
			return err
		}
		return lift("the instance is gone, and there is no revision to go back to")
	}
	if s.rec.Load().down() {
		return lift("the instance is gone; the service is suspended")
	}
	rev, err := s.data.revision(s.name, cur.Generation)
	if err != nil {
		return err
	}
	if _, err := s.ensureImage(ctx, cur.reference); err != nil {
		return err
	}
	if err := s.writeUnit(ctx, rev, rev.unit); err != nil {
		return err
	}
	if h.Candidate {
		return lift("the candidate is gone; the current revision's unit is in place and not started")
	}
	if err := s.startCurrent(ctx, rev, func(r *record, now time.Time) error {
		r.Held.StartedAt, r.Resume = &now, nil
		return nil
	}); err != nil {
		return err
	}
	return lift("the instance is gone; the current revision is started again")
}

// startCurrent starts the current revision outside of a rollout: its unit is in place and nothing of it
// runs. The start is meant durably before it is made; meant marks it in the record. It is not made for a
// service that is to stay down.
func (s *service) startCurrent(ctx context.Context, rev *revision, meant func(r *record, now time.Time) error) error {
	unit := serviceName(rev.Enrollment.Unit)
	st, err := s.host.units.Unit(ctx, unit)
	if err != nil {
		return err
	}
	if err := s.commit(func(r *record) error {
		if r.down() {
			return errSubmitted
		}
		r.Watch = restarts{Count: r.Watch.Count, Before: st.InvocationID}
		return meant(r, s.now())
	}); err != nil {
		return err
	}
	if err := s.host.units.ResetFailed(ctx, unit); err != nil {
		s.log.Debug("resetting the failed state", "err", err)
	}
	if s.rec.Load().down() {
		return errSubmitted
	}
	if err := s.host.units.Start(ctx, unit); err != nil && !errors.Is(err, errNoAnswer) {
		return err
	}
	return nil
}
