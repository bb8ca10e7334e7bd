// dryrun.go tells what a deployment would meet and change, and stores nothing.
package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/rogpeppe/go-internal/diff"
)

// A dry run asks the registry for so long, and looks at so many ended operations.
const (
	dryRunPatience   = 15 * time.Second
	dryRunOperations = 50
)

type wireCheck struct {
	Name    string `json:"name"`
	Outcome string `json:"outcome"` // passed, refused, or skipped because of a check before it; of doctor: passed, problem, unknown
	Code    string `json:"code,omitempty"`
	Detail  string `json:"detail,omitempty"`
}

// wireChange is one key of the unit that would differ. Its values are not told: they may be secret.
type wireChange struct {
	Section string `json:"section"`
	Key     string `json:"key"`
	Change  string `json:"change"` // added, removed, changed
}

type wireFailedBefore struct {
	OperationID string   `json:"operation_id"`
	State       string   `json:"state"`
	Code        string   `json:"code"`
	FinishedAt  wireTime `json:"finished_at"`
}

type wireTarget struct {
	Generation int64         `json:"generation"`
	Digest     string        `json:"digest"`
	Ready      bool          `json:"ready"`
	Problems   []wireProblem `json:"problems"`
}

type wireDryRun struct {
	Service      string            `json:"service"`
	Accepted     bool              `json:"would_be_accepted"` // no check refuses it
	Checks       []wireCheck       `json:"checks"`
	Current      *wireRevision     `json:"current"`
	Generation   int64             `json:"generation"` // of the candidate
	Candidate    wireCandidate     `json:"candidate"`
	UnitChanges  []wireChange      `json:"unit_changes"`
	UnitDiff     string            `json:"unit_diff,omitempty"` // local answers only
	FailedBefore *wireFailedBefore `json:"failed_before"`       // the last time this digest did
	Target       *wireTarget       `json:"rollback_target"`     // what a failure would go back to
}

// dryRun makes every check that a submission would meet, in their order, and goes on after one that
// refuses. Beyond these it looks at the image's manifest in the registry.
func (s *service) dryRun(ctx context.Context, sub submission, local bool) (wireDryRun, error) {
	if err := s.usable(); err != nil {
		return wireDryRun{}, err
	}
	en, enErr := s.enrollment()
	r := s.rec.Load()
	d := wireDryRun{Service: s.name, Accepted: true, Generation: r.NextGeneration, Candidate: wireCandidate{sub.image, digestOf(sub.image)}, UnitChanges: []wireChange{}}
	judge := func(name string, err error) {
		c := wireCheck{Name: name, Outcome: "passed"}
		var refused *apiError
		switch {
		case err == nil:
		case errors.As(err, &refused):
			c.Outcome, c.Code, c.Detail = "refused", refused.Code, refused.Detail
		default:
			f := public(err)
			c.Outcome, c.Code, c.Detail = "refused", f.Code, f.Summary
			s.log.Warn("dry run", "check", name, "err", err)
		}
		d.Accepted = d.Accepted && err == nil
		d.Checks = append(d.Checks, c)
	}
	skip := func(name string) { d.Checks = append(d.Checks, wireCheck{Name: name, Outcome: "skipped"}) }

	s.mu.Lock()
	bearer, err := s.bearer(sub.actor)
	exhausted := s.exhausted(bearer)
	if err == nil && s.tokensErr != nil {
		err = s.unavailable(s.tokensErr)
	}
	s.mu.Unlock()
	if err != nil {
		return d, err
	}
	op, err := s.known(sub, r)
	judge("key", err)
	if op != nil {
		d.Checks[0].Detail = "operation " + op.ID + " was made with it, and would be the answer"
	}
	allowed := false
	for name, err := range s.admission(sub, r, en, enErr, exhausted, s.data.space) {
		if name == "repository" && enErr != nil {
			skip(name)
			continue
		}
		allowed = allowed || name == "repository" && err == nil
		judge(name, err)
	}
	if allowed {
		ictx, cancel := context.WithTimeout(ctx, dryRunPatience)
		err := s.host.inspect(ictx, s.images(), sub.image, en.ImageLimit)
		cancel()
		if ctx.Err() != nil {
			return d, ctx.Err()
		}
		judge("image", err)
	} else {
		skip("image")
	}

	// What Toad itself adds is the current revision's: what differs is the template and the image.
	id := unitIdentity{DataID: s.data.id, Service: s.name, Generation: r.NextGeneration, Image: sub.image}
	var old []byte
	if cur := r.Current; cur != nil {
		d.Current = wireRevisionOf(cur)
		rev, err := s.data.revision(s.name, cur.Generation)
		if err != nil {
			return d, s.unavailable(err)
		}
		old, id.Generation, id.Operation = rev.unit, rev.Generation, rev.Operation
		s.live.Lock()
		_, problems, looked := s.live.restorable(r)
		s.live.Unlock()
		d.Target = &wireTarget{cur.Generation, cur.digest(), looked && len(problems) == 0, append([]wireProblem{}, problems...)}
	}
	if enErr == nil {
		unit := renderUnit(en, id)
		d.UnitChanges = unitChanges(old, unit)
		if local {
			d.UnitDiff = string(diff.Diff("current", old, "candidate", unit))
		}
	}
	d.FailedBefore, err = s.failedBefore(r, digestOf(sub.image))
	return d, err
}

// unitChanges lists the keys that differ, in the order of the new unit, then of the old one.
func unitChanges(old, unit []byte) []wireChange {
	type place struct{ section, key string }
	var order []place
	read := func(text []byte) map[place]string {
		u, err := scanUnit(text)
		if err != nil {
			return nil // rendered units can be read
		}
		values := map[place]string{}
		for _, l := range u.lines {
			if l.key == "" {
				continue
			}
			p := place{l.group, l.key}
			if !slices.Contains(order, p) {
				order = append(order, p)
			}
			values[p] += l.value + "\n"
		}
		return values
	}
	now, before := read(unit), read(old)
	changes := []wireChange{}
	for _, p := range order {
		a, had := before[p]
		b, has := now[p]
		switch {
		case !had:
			changes = append(changes, wireChange{p.section, p.key, "added"})
		case !has:
			changes = append(changes, wireChange{p.section, p.key, "removed"})
		case a != b:
			changes = append(changes, wireChange{p.section, p.key, "changed"})
		}
	}
	return changes
}

// failedBefore finds the last operation, among the newest, that did not promote this digest.
func (s *service) failedBefore(r *record, digest string) (*wireFailedBefore, error) {
	ids, err := s.data.operationIDs(s.name)
	if err != nil {
		return nil, err
	}
	var ended []*operation
	if r.Operation != nil {
		ended = append(ended, r.Operation)
	}
	for _, id := range ids[:min(len(ids), dryRunOperations)] {
		if op, err := s.data.operation(s.name, id); err == nil {
			ended = append(ended, op)
		}
	}
	for _, op := range ended {
		if op.Failure == nil || op.FinishedAt == nil || op.Candidate.digest() != digest {
			continue
		}
		return &wireFailedBefore{op.ID, string(op.State), op.Failure.Code, wireTime(*op.FinishedAt)}, nil
	}
	return nil, nil
}
