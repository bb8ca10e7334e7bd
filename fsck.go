// fsck.go proves that the records are what they should be, all of them in one pass, and puts one back
// when it is asked for by name. What it puts back never undoes a generation, an accepted operation or a
// promotion: a record of before is only told what is current, everything else comes from the evidence.
package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"
	"golang.org/x/sys/unix"
)

// finding is one thing that is not as it should be.
type finding struct {
	File    string `json:"file"` // below the data directory
	Service string `json:"service,omitempty"`
	Problem string `json:"problem"`
}

type fsckRequest struct {
	Restore string `json:"restore"` // a record to put back; "": check only
}

type wireFsck struct {
	OK       bool      `json:"ok"`
	Findings []finding `json:"findings"`
	Restored string    `json:"restored,omitempty"` // what was put back, and from what
}

// fsck reads every record and changes nothing. lock is taken around each service, so that a running
// server's commit is seen whole.
func (d *dataDir) fsck(lock func(service string) (unlock func())) []finding {
	var all []finding
	if _, err := d.readID(); err != nil {
		all = append(all, finding{File: "id", Problem: err.Error()})
	}
	if c := d.audit("", lock); c.Problem != "" {
		all = append(all, finding{File: c.File, Problem: c.Problem})
	}
	entries, err := os.ReadDir(filepath.Join(d.path, "services"))
	if err != nil {
		all = append(all, finding{File: "services", Problem: err.Error()})
	}
	for _, e := range entries {
		if !e.IsDir() || !serviceID.MatchString(e.Name()) {
			all = append(all, finding{File: filepath.Join("services", e.Name()), Problem: "this is no service"})
			continue
		}
		all = append(all, d.fsckWhile(e.Name(), lock)...)
	}
	return all
}

// fsckWhile looks at a service whose server may go on meanwhile: images take long to hash. What is found
// counts if the records stood still, and is looked for with the lock held if they never do.
func (d *dataDir) fsckWhile(service string, lock func(service string) (unlock func())) []finding {
	stand := func() (signs [3]unix.Stat_t) {
		defer lock(service)()
		for i, name := range []string{"service.json", "tokens.json", "events.jsonl"} {
			if unix.Stat(d.serviceFile(service, name), &signs[i]) != nil {
				signs[i] = unix.Stat_t{}
			}
			signs[i].Atim = unix.Timespec{}
		}
		return signs
	}
	for range 5 {
		before := stand()
		found := d.fsckService(service)
		if len(found) == 0 || stand() == before {
			return found
		}
	}
	defer lock(service)()
	return d.fsckService(service)
}

func (d *dataDir) fsckService(service string) []finding {
	var all []finding
	dir := d.serviceFile(service)
	bad := func(path, format string, a ...any) {
		rel, err := filepath.Rel(d.path, path)
		if err != nil {
			rel = path
		}
		// The path is said once, as the finding's own.
		text := strings.ReplaceAll(fmt.Sprintf(format, a...), path, filepath.Base(path))
		all = append(all, finding{File: rel, Service: service, Problem: text})
	}
	main := filepath.Join(dir, "service.json")
	r := &record{}
	err := readRecord(main, r)
	if err == nil && r.Service != service {
		err = fmt.Errorf("it is of service %q", r.Service)
	}
	if err == nil {
		err = r.check()
	}
	if errors.Is(err, fs.ErrNotExist) {
		// Enrolled, and never deployed: there is nothing yet.
		left, _ := filepath.Glob(filepath.Join(dir, "*", "*.json"))
		if st, err := os.Stat(filepath.Join(dir, "events.jsonl")); len(left) == 0 && (err != nil || st.Size() == 0) {
			if _, err := d.tokens(service, "tokens.json"); err != nil {
				bad(filepath.Join(dir, "tokens.json"), "%v", err)
			}
			return all
		}
	}
	if err != nil {
		bad(main, "%v", err)
		r = nil
	}
	if f, err := d.tokens(service, "tokens.json"); err != nil {
		bad(filepath.Join(dir, "tokens.json"), "%v", err)
	} else {
		told := d.toldTokens(service)
		for _, t := range f.Tokens {
			if t.RevokedAt == nil && told[t.ID] == "token-revoked" {
				bad(filepath.Join(dir, "tokens.json"), "token %s was revoked, and is not here", t.ID)
			}
		}
	}
	head, err := verifyEvents(filepath.Join(dir, "events.jsonl"))
	if err != nil {
		bad(filepath.Join(dir, "events.jsonl"), "%v", err)
	} else if r != nil {
		if end := r.eventEnd(); head != end {
			bad(filepath.Join(dir, "events.jsonl"), "%v", endsElsewhere(head, end, "service.json"))
		}
	}

	// What the record refers to must be there and belong to it.
	refer := func(what string, p *reference, image bool) {
		path := filepath.Join(dir, "revisions", fmt.Sprint(p.Generation)+".json")
		rev, err := d.revision(service, p.Generation)
		switch {
		case err != nil:
			bad(path, "the %s revision: %v", what, err)
		case rev.Image != p.Image || rev.Operation != p.Operation:
			bad(path, "it is not the revision that service.json calls %s", what)
		case image:
			if _, err := checkLayout(filepath.Join(dir, "images"), p.digest()); err != nil {
				bad(filepath.Join(dir, "images"), "the image of the %s revision: %v", what, err)
			}
		}
	}
	if r != nil {
		images := r.Retired == nil // else they are being removed
		if r.Current != nil {
			refer("current", &r.Current.reference, images)
		}
		if r.Rollback != nil {
			refer("retained", &r.Rollback.reference, images)
		}
		if b := r.Barrier; b != nil && (r.Operation == nil || r.Operation.ID != b.Operation) {
			if _, err := d.operation(service, b.Operation); err != nil {
				bad(filepath.Join(dir, "operations", b.Operation+".json"), "the operation that raised the barrier: %v", err)
			}
		}
		if op := r.active(); op != nil && op.State != preparing {
			refer("candidate", &op.Candidate, true)
		}
		if r.Current != nil && r.Installed && r.active() == nil && r.Held == nil {
			if rev, err := d.revision(service, r.Current.Generation); err == nil {
				path := filepath.Join(d.quadlets, service, rev.Enrollment.Unit)
				if b, err := os.ReadFile(path); err != nil || string(b) != string(rev.unit) {
					bad(path, "the unit of the current revision is missing or differs from revisions/%d.container", r.Current.Generation)
				}
			}
		}
	}

	d.fsckFiles(service, r, bad)
	return all
}

// fsckFiles looks at every file of a service but the blobs of its images, each of which was hashed if it is
// referred to. r is the service's record, nil if it is not to be trusted.
func (d *dataDir) fsckFiles(service string, r *record, bad func(path, format string, a ...any)) {
	dir := d.serviceFile(service)
	_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			bad(path, "%v", err)
			return nil
		}
		rel, _ := filepath.Rel(dir, path)
		if e.IsDir() {
			if rel == "images" {
				return filepath.SkipDir
			}
			return nil
		}
		name, ofPrev := strings.CutSuffix(e.Name(), ".prev")
		sub := filepath.Dir(rel)
		switch {
		case temporaryName.MatchString(e.Name()), strings.Contains(e.Name(), ".damaged-"): // swept at the next start; kept for a person
		case rel == "service.json", rel == "events.jsonl", rel == "tokens.json":
		case sub == "." && name == "tokens.json":
			if _, err := d.tokens(service, e.Name()); err != nil {
				bad(path, "%v", err)
			}
		case sub == "." && name == "service.json":
			if err := readRecord(path, &record{}); err != nil {
				bad(path, "%v", err)
			}
		case sub == "revisions" && strings.HasSuffix(name, ".container"):
			base := strings.TrimSuffix(path, ".container")
			if _, err := os.Lstat(base + ".json"); err != nil && !ofPrev {
				g, _ := strconv.ParseInt(strings.TrimSuffix(name, ".container"), 10, 64)
				if r == nil || r.active() == nil || r.active().Candidate.Generation != g {
					bad(path, "there is no record beside it")
				}
			}
		case sub == "revisions" && revisionFile.MatchString(name):
			if ofPrev {
				break
			}
			g, _ := strconv.ParseInt(strings.TrimSuffix(name, ".json"), 10, 64)
			if _, err := d.revision(service, g); err != nil {
				bad(path, "%v", err)
			}
		case sub == "operations" && strings.HasSuffix(name, ".json"):
			op, err := d.operation(service, strings.TrimSuffix(name, ".json"))
			switch {
			case err != nil:
				bad(path, "%v", err)
			case !op.State.terminal():
				bad(path, "an archived operation is %s", op.State)
			case op.Key != "" && (r == nil || r.Operation == nil || r.Operation.ID != op.ID): // that one may just be being archived
				if k, err := d.key(service, op.Key); err != nil || k.Operation != op.ID || k.State != op.State {
					bad(d.keyPath(service, op.Key), "the key of operation %s does not name it", op.ID)
				}
			}
		case sub == "operations" && (strings.HasSuffix(name, ".log") || strings.HasSuffix(name, ".output")):
		case sub == "keys" && keyFileName.MatchString(name):
			if err := readRecord(path, &keyFile{}); err != nil {
				bad(path, "%v", err)
			}
		default:
			bad(path, "unknown file")
		}
		return nil
	})
}

var (
	revisionFile  = regexp.MustCompile(`^[0-9]+\.json$`)
	operationFile = regexp.MustCompile(`^[0-9a-z]{26}\.json$`)
	keyFileName   = regexp.MustCompile(`^[0-9a-f]{64}\.json$`)
)

// brokenChain says which line of a log of events is not as it should be. Lines are counted from 1, as
// cursors are.
type brokenChain struct {
	line int64
	text string
}

func (b *brokenChain) Error() string { return fmt.Sprintf("line %d %s", b.line, b.text) }

// endsElsewhere says how a whole log differs from the end that somebody names.
func endsElsewhere(head, end eventHead, by string) *brokenChain {
	switch {
	case head.Cursor < end.Cursor:
		return &brokenChain{head.Cursor + 1, fmt.Sprintf("is missing: the last that %s names is %d; what a Toad that was killed had no time to write is added when it starts, anything else was removed", by, end.Cursor)}
	case head.Cursor > end.Cursor:
		return &brokenChain{end.Cursor + 1, fmt.Sprintf("is one too many: the last that %s names is %d", by, end.Cursor)}
	}
	return &brokenChain{head.Cursor, fmt.Sprintf("was replaced: it is not the one that %s names", by)}
}

// verifyEvents follows the chain of a whole log and returns its end. A log that is not there is empty.
func verifyEvents(path string) (eventHead, error) { return verifyEventsTo(path, math.MaxInt64) }

// verifyEventsTo follows the chain of the first size bytes, to the first line that does not fit: the error
// is then a *brokenChain.
func verifyEventsTo(path string, size int64) (eventHead, error) {
	var head eventHead
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return head, nil
	} else if err != nil {
		return head, err
	}
	defer f.Close()
	bad := func(format string, a ...any) (eventHead, error) {
		return head, &brokenChain{head.Cursor + 1, fmt.Sprintf(format, a...)}
	}
	for r := bufio.NewReader(io.LimitReader(f, size)); ; {
		line, err := r.ReadBytes('\n')
		switch {
		case err == io.EOF && len(line) == 0:
			return head, nil
		case err == io.EOF:
			return bad("is torn")
		case err != nil:
			return head, err
		}
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			return bad("is no event: %v", err)
		}
		sealed := e
		next := sealed.seal(eventHead{e.Cursor - 1, e.Prev})
		again, err := json.Marshal(sealed)
		switch {
		case err != nil || sealed != e || string(again)+"\n" != string(line):
			return bad("was changed")
		case e.Cursor != head.Cursor+1:
			return bad("has cursor %d: lines before it were removed, added or moved", e.Cursor)
		case e.Prev != head.Hash:
			return bad("does not follow from the one before it: one of them was replaced")
		}
		head = next
	}
}

// evidence is what everything but the record to be put back says of a service.
type evidence struct {
	highest  int64             // of all numbers found
	promoted int64             // the highest generation that some record says was promoted
	accepted map[string]string // operations that were accepted: id → image, where it is known
	ended    map[string]bool   // operations whose end the event log tells
	logged   []string          // operations that the event log says were promoted
	head     eventHead         // the event log's end
	logErr   error             // why the event log is not to be trusted
	asked    map[string]event  // the last event since the record of each kind: suspend, resume, retire, deploy, held
	lifted   map[string]bool   // operations whose barrier was lifted
}

var numbers = regexp.MustCompile(`"(?:next_)?generation": ([0-9]{1,15})\b`)

// gather reads everything of a service that can be read, a damaged service.json included. What was asked for
// before from was written is in from.
func (d *dataDir) gather(service string, from *record, running []container) evidence {
	ev := evidence{accepted: map[string]string{}, asked: map[string]event{}, ended: map[string]bool{}, lifted: map[string]bool{}}
	see := func(g int64) { ev.highest = max(ev.highest, g) }
	dir := d.serviceFile(service)
	for _, name := range []string{"service.json", "service.json.prev"} {
		b, _ := os.ReadFile(filepath.Join(dir, name))
		for _, m := range numbers.FindAllSubmatch(b, -1) {
			g, _ := strconv.ParseInt(string(m[1]), 10, 64)
			see(g)
		}
	}
	generations := map[string]int64{} // by operation
	revisions, _ := filepath.Glob(filepath.Join(dir, "revisions", "*"))
	for _, p := range revisions {
		stem, _, _ := strings.Cut(filepath.Base(p), ".")
		if g, err := strconv.ParseInt(stem, 10, 64); err == nil {
			see(g)
			if rev, err := d.revision(service, g); err == nil {
				generations[rev.Operation] = g
				ev.accepted[rev.Operation] = rev.Image
			}
		}
	}
	ids, _ := d.operationIDs(service)
	for _, id := range ids {
		if op, err := d.operation(service, id); err == nil {
			see(op.Candidate.Generation)
			generations[id] = op.Candidate.Generation
			if op.State == promoted {
				ev.promoted = max(ev.promoted, op.Candidate.Generation)
			}
		}
	}
	log := filepath.Join(dir, "events.jsonl")
	ev.head, ev.logErr = verifyEvents(log)
	b, _ := os.ReadFile(log)
	// A log that lost its end, or was begun anew, does not have the line that from ends with: the time tells then.
	end := from.eventEnd()
	since := end == eventHead{}
	for line := range strings.Lines(string(b)) {
		var e event
		if json.Unmarshal([]byte(line), &e) != nil {
			continue
		}
		if ev.logErr == nil && (since || e.At.After(from.UpdatedAt)) {
			switch e.Type {
			case "deploy", "suspend", "resume", "retire", "held":
				ev.asked[e.Type] = e
			}
		}
		if ev.logErr == nil && e.Type == "reconcile" {
			ev.lifted[e.Operation] = true
		}
		if e.Cursor == end.Cursor && e.Hash == end.Hash {
			since = true
			clear(ev.asked)
		}
		if !operationID.MatchString(e.Operation) {
			continue
		}
		switch e.Type {
		case "deploy":
			if _, ok := ev.accepted[e.Operation]; !ok {
				ev.accepted[e.Operation] = e.Detail
			}
		case "promote":
			ev.logged = append(ev.logged, e.Operation)
			ev.promoted = max(ev.promoted, generations[e.Operation])
			ev.ended[e.Operation] = true
		case "rollback", "rollback-failed", "failed":
			ev.ended[e.Operation] = true
		}
	}
	units, _ := filepath.Glob(filepath.Join(d.quadlets, service, "*.container"))
	for _, p := range units {
		b, _ := os.ReadFile(p)
		if m, ok := parseMarker(b); ok && m.DataID == d.id && m.Service == service {
			see(m.Generation)
			if len(installTargets(b)) > 0 { // the promoted form is written after the promotion only
				ev.promoted = max(ev.promoted, m.Generation)
			}
		}
	}
	for _, c := range running {
		if g, err := strconv.ParseInt(c.Labels["toad.generation"], 10, 64); err == nil && c.Labels["toad.service"] == service {
			see(g)
		}
	}
	return ev
}

// toldTokens is the last that a service's event log says of each token.
func (d *dataDir) toldTokens(service string) map[string]string {
	told := map[string]string{}
	b, _ := os.ReadFile(d.serviceFile(service, "events.jsonl"))
	for line := range strings.Lines(string(b)) {
		var e event
		if json.Unmarshal([]byte(line), &e) == nil && strings.HasPrefix(e.Type, "token-") {
			told[e.Detail] = e.Type
		}
	}
	return told
}

// restoreTokens writes tokens.json from one of before, or from itself. Of it only those tokens stay valid
// that the event log knows as issued and not as revoked; none if the log does not verify, or has not the end
// that service.json names.
func (d *dataDir) restoreTokens(from *tokenFile, now time.Time) error {
	told := d.toldTokens(from.Service)
	_, err := verifyEvents(d.serviceFile(from.Service, "events.jsonl"))
	if r := (&record{}); err == nil && readRecord(d.serviceFile(from.Service, "service.json"), r) == nil {
		if !d.eventsFit(r) {
			err = fmt.Errorf("%w: the event log does not end where service.json says", errCorrupt)
		}
		for _, e := range r.Events { // not in the log yet, perhaps
			if strings.HasPrefix(e.Type, "token-") {
				told[e.Detail] = e.Type
			}
		}
	}
	if err != nil {
		told = nil
	}
	f := *from
	f.Tokens, f.Owed = slices.Clone(from.Tokens), nil
	for i, t := range f.Tokens {
		if t.RevokedAt == nil && told[t.ID] != "token-issued" {
			f.Tokens[i].RevokedAt = &now
		}
		if f.Tokens[i].RevokedAt != nil && told[t.ID] != "token-revoked" {
			f.Owed = append(f.Owed, tokenEvent{"token-revoked", t.ID, "local"})
		}
	}
	path := d.serviceFile(from.Service, "tokens.json")
	if _, err := d.tokens(from.Service, "tokens.json"); errors.Is(err, errNewer) {
		return fmt.Errorf("restoring %s: %w", path, err)
	} else if err != nil {
		if err := setAside(path, now.UTC().Format("20060102T150405")); err != nil {
			return err
		}
	}
	return d.withReserve(func() error { return writeRecord(path, &f) })
}

// restoreService puts service.json back from a record of before. Its current and retained revisions are
// taken, if nothing says that a later one was promoted; generation and next generation go above every
// number found, so that every request made before is stale; every operation under way or only known
// from the log ends interrupted; an instance that may still run as a candidate is held until it is gone.
// The damaged file is kept beside it.
func (d *dataDir) restoreService(service string, from *record, running []container, now time.Time) error {
	if from.Service != service {
		return fmt.Errorf("restoring %s: the record is of service %s", service, from.Service)
	}
	if err := from.check(); err != nil {
		return fmt.Errorf("restoring %s: %w", service, err)
	}
	if err := readRecord(d.serviceFile(service, "service.json"), &record{}); errors.Is(err, errNewer) {
		return fmt.Errorf("restoring %s: %w", service, err)
	}
	ev := d.gather(service, from, running)
	var cur int64
	curOp := ""
	if from.Current != nil {
		cur, curOp = from.Current.Generation, from.Current.Operation
	}
	if ev.promoted > cur {
		return fmt.Errorf("restoring %s: refused: generation %d was promoted later than this record's %d", service, ev.promoted, cur)
	}
	for _, id := range ev.logged {
		if id > curOp { // ids sort by time
			return fmt.Errorf("restoring %s: refused: the event log says that operation %s was promoted later", service, id)
		}
	}
	for _, p := range []*promotedRevision{from.Current, from.Rollback} {
		if p == nil {
			continue
		}
		if rev, err := d.revision(service, p.Generation); err != nil {
			return fmt.Errorf("restoring %s: its revision %d: %w", service, p.Generation, err)
		} else if rev.Image != p.Image {
			return fmt.Errorf("restoring %s: revision %d is not the one it names", service, p.Generation)
		}
	}

	r := from.clone()
	highest := max(ev.highest, r.Generation, r.NextGeneration)
	r.Generation, r.NextGeneration = highest+1, highest+2
	r.Installed = false
	ev.takeUp(r)
	interrupted := public(failed("interrupted", nil, "its record was lost and put back from an earlier one"))
	var untold []string // operations whose end no event tells
	bars := func(op *operation, from state) {
		if op.raisesBarrier(from) && !ev.lifted[op.ID] {
			r.Barrier = &barrier{op.ID, *op.FinishedAt}
		}
	}
	tell := func(op *operation) {
		if ev.logErr != nil || !ev.ended[op.ID] {
			untold = append(untold, op.ID)
		}
	}
	end := func(op *operation) {
		from := op.State
		op.State, op.Failure, op.FinishedAt, op.UpdatedAt = hasFailed, &interrupted, &now, now
		op.Timeline = append(op.Timeline, transition{hasFailed, now})
		bars(op, from)
		tell(op)
	}
	var maybe *reference // a candidate that may run
	by := ""             // the operation that started it, if maybe does not say it
	// ended takes up an operation that ended since: by itself, or by a restore that was killed and came no further.
	ended := func(op *operation) {
		bars(op, op.Timeline[max(0, len(op.Timeline)-2)].State)
		if op.State == hasFailed && op.Failure != nil && *op.Failure == interrupted {
			if op.Candidate.Generation > 0 {
				maybe = &op.Candidate
			}
			tell(op)
		}
	}
	if op := r.active(); op != nil {
		if archived, err := d.operation(service, op.ID); err == nil {
			r.Operation = archived
			ended(archived)
		} else {
			if op.State != preparing {
				maybe = &op.Candidate
				if d.lacks(service, maybe.Generation) && r.Current != nil {
					maybe, by = &r.Current.reference, op.ID // all of a service's revisions have one unit and one container name
				}
			}
			end(op)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(ev.accepted)) {
		if r.Operation != nil && id <= r.Operation.ID {
			continue
		}
		r.Barrier, r.Held = nil, nil // it was accepted: neither was in its way
		if op, err := d.operation(service, id); err == nil {
			ended(op)
			continue
		}
		op := operation{ID: id, Kind: "deploy", RequestedBy: "unknown", State: preparing, CreatedAt: idTime(id).UTC(), Candidate: reference{Image: ev.accepted[id], Operation: id},
			Timeline: []transition{{preparing, idTime(id).UTC()}}}
		if g := d.generationOf(service, id); g > 0 { // how far it came is not known
			op.Candidate.Generation = g
			maybe = &reference{Generation: g, Image: op.Candidate.Image, Operation: id}
			if rev, err := d.revision(service, g); err == nil && rev.Enrollment.Barrier {
				op.State, op.Barrier = activating, true
				op.Timeline = append(op.Timeline, transition{activating, idTime(id).UTC()})
			}
		}
		end(&op)
		if err := d.archive(service, &op); err != nil {
			return err
		}
	}
	if maybe != nil {
		if _, err := d.revision(service, maybe.Generation); err == nil {
			r.Held = &held{Operation: cmp.Or(by, maybe.Operation), Since: now, Revision: *maybe, Remains: []string{"not looked at since the record was put back"}}
		}
	}
	stamp := now.UTC().Format("20060102T150405")
	log := d.serviceFile(service, "events.jsonl")
	if ev.logErr != nil {
		// Which tokens were revoked is not known: before the log is gone, all of them are.
		tokens, err := d.tokens(service, "tokens.json")
		if err == nil && len(tokens.Tokens) > 0 {
			err = d.restoreTokens(tokens, now)
		}
		if err != nil && !errors.Is(err, errCorrupt) { // of a damaged one none is valid
			return err
		}
		if err := setAside(log, stamp); err != nil {
			return err
		}
		if err := removeFile(log); err != nil {
			return err
		}
		ev.head = eventHead{}
	}
	e := event{At: now, Type: "restore", Service: service, Operation: curOp, Actor: "local", Detail: fmt.Sprintf("put back with current generation %d as generation %d", cur, r.Generation)}
	r.EventHead = ev.head
	head := e.seal(ev.head)
	r.Events, r.UpdatedAt = []event{e}, now
	for _, id := range untold {
		e := event{At: now, Type: "failed", Service: service, Operation: id, Actor: "toad", Detail: interrupted.Code}
		head = e.seal(head)
		r.Events = append(r.Events, e)
	}
	if err := r.check(); err != nil {
		return fmt.Errorf("restoring %s: %w", service, err)
	}
	main := d.serviceFile(service, "service.json")
	if err := setAside(main, stamp); err != nil {
		return err
	}
	if err := d.save(r); err != nil {
		return err
	}
	_, err := d.openEvents(r)
	return err
}

// takeUp makes of a record of before what was asked for since it was written, which is in the log.
func (ev *evidence) takeUp(r *record) {
	last := func(kind string) int64 { return ev.asked[kind].Cursor }
	if e := ev.asked["suspend"]; e.Cursor > last("resume") && e.Cursor > last("retire") && r.Suspended == nil && r.Retired == nil && r.Current != nil {
		r.Suspended, r.Resume = &suspension{Since: e.At, By: e.Actor}, nil
	}
	if e := ev.asked["resume"]; e.Cursor > last("suspend") && r.Suspended != nil {
		r.Suspended, r.Resume = nil, &resumption{Since: e.At, By: e.Actor}
	}
	if last("deploy") > last("retire") {
		r.Retired = nil
	} else if e := ev.asked["retire"]; e.Cursor > last("deploy") && r.Retired == nil {
		r.Retired, r.Suspended, r.Resume = &retirement{Since: e.At, By: e.Actor}, nil, nil
	}
	if r.Barrier != nil && ev.lifted[r.Barrier.Operation] {
		r.Barrier = nil
	}
	if _, over := ev.asked["held"]; over { // the first that a record with a hold is followed by tells its end
		r.Held = nil
	}
}

// generationOf finds the generation of an operation by its revision; 0 if it got none.
func (d *dataDir) generationOf(service, id string) int64 {
	paths, _ := filepath.Glob(d.serviceFile(service, "revisions", "*.json"))
	for _, p := range paths {
		g, err := strconv.ParseInt(strings.TrimSuffix(filepath.Base(p), ".json"), 10, 64)
		if rev, rerr := d.revision(service, g); err == nil && rerr == nil && rev.Operation == id {
			return g
		}
	}
	return 0
}

// setAside keeps a damaged file beside its successor, for a person. It stays in its place until that replaces
// it: whoever is killed in between has lost nothing.
func setAside(path, stamp string) error {
	if err := boundary("set-aside", path); err != nil {
		return storageError("setting aside", path, err)
	}
	if err := os.Link(path, path+".damaged-"+stamp); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrExist) {
		return storageError("setting aside", path, err)
	}
	return syncDir(filepath.Dir(path))
}

// restoreNamed puts one record back from its last valid predecessor. Only service.json and tokens.json have
// one that a restore can use; every other record is immutable and comes from a backup.
func (d *dataDir) restoreNamed(name string, running func(service string) ([]container, error), now time.Time) (string, error) {
	name = filepath.Clean(strings.TrimPrefix(name, d.path+string(filepath.Separator)))
	parts := strings.Split(name, string(filepath.Separator))
	if len(parts) != 3 || parts[0] != "services" || !serviceID.MatchString(parts[1]) || parts[2] != "service.json" && parts[2] != "tokens.json" {
		return "", fmt.Errorf("restoring %s: only services/SERVICE/service.json and tokens.json are put back by name; other records come from a backup (toad restore)", name)
	}
	service := parts[1]
	if parts[2] == "tokens.json" {
		if _, err := os.Lstat(d.serviceFile(service, "tokens.json")); err == nil {
			if _, err := d.tokens(service, "tokens.json"); err == nil {
				return "", fmt.Errorf("restoring %s: it is whole; nothing was changed", name)
			}
		}
		from, err := d.tokens(service, "tokens.json.prev")
		if err == nil && from.SHA256 == "" {
			err = errNotFound
		}
		if err != nil {
			return "", fmt.Errorf("restoring %s: its predecessor: %w; put it back from a backup (toad restore)", name, err)
		}
		return name + " from tokens.json.prev", d.restoreTokens(from, now)
	}
	list, err := running(service)
	if err != nil {
		return "", fmt.Errorf("restoring %s: what runs as the service is not known: %w", name, err)
	}
	if r := (&record{}); readRecord(d.serviceFile(service, "service.json"), r) == nil && r.check() == nil {
		if d.eventsFit(r) {
			if op := r.active(); op != nil && op.State != preparing && d.lacks(service, op.Candidate.Generation) {
				// Nothing can be done of the operation without it, and no backup has it.
				return name + " kept, the operation that lost its revision ended", d.restoreService(service, r, list, now)
			}
			return "", fmt.Errorf("restoring %s: it is whole; nothing was changed", name)
		}
		// The record is whole and the event log is not: the record itself says what is current.
		return name + " kept, its event log begun anew", d.restoreService(service, r, list, now)
	}
	from := &record{}
	if err := readRecord(d.serviceFile(service, "service.json.prev"), from); err != nil {
		return "", fmt.Errorf("restoring %s: its predecessor: %w; put it back from a backup (toad restore)", name, err)
	}
	return name + " from service.json.prev", d.restoreService(service, from, list, now)
}

// lacks tells that a revision is missing or damaged.
func (d *dataDir) lacks(service string, generation int64) bool {
	_, err := d.revision(service, generation)
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, errCorrupt)
}

// eventsFit tells whether the event log ends where the record says, without changing it: what its last
// commit made known may be missing.
func (d *dataDir) eventsFit(r *record) bool {
	head, err := verifyEvents(d.serviceFile(r.Service, "events.jsonl"))
	return err == nil && (head == r.EventHead || slices.ContainsFunc(r.Events, func(e event) bool { return head == eventHead{e.Cursor, e.Hash} }))
}

// backupEnd is the last member of a backup: without it the backup is not whole.
const backupEnd = "toad-backup-complete"

// backup writes every record, and the images of current and retained revisions, as a tar. lock is taken
// around what changes; the rest is immutable.
func (d *dataDir) backup(w io.Writer, lock func(service string) (unlock func()), now time.Time) error {
	tw := tar.NewWriter(w)
	copyIn := func(rel string, from io.Reader, size int64) error {
		if err := tw.WriteHeader(&tar.Header{Name: rel, Mode: 0o600, Size: size, ModTime: now, Format: tar.FormatPAX}); err != nil {
			return err
		}
		_, err := io.CopyN(tw, from, size)
		return err
	}
	add := func(rel string, data []byte) error { return copyIn(rel, bytes.NewReader(data), int64(len(data))) }
	addFile := func(rel string) error {
		f, err := os.Open(filepath.Join(d.path, rel))
		if err != nil {
			return err
		}
		defer f.Close()
		st, err := f.Stat()
		if err != nil {
			return err
		}
		return copyIn(rel, f, st.Size())
	}
	if err := addFile("id"); err != nil {
		return fmt.Errorf("backing up: %w", err)
	}
	names, err := d.services()
	if err != nil {
		return err
	}
	for _, name := range names {
		unlock := lock(name)
		main, err := os.ReadFile(d.serviceFile(name, "service.json"))
		var events, tokens []byte
		if err == nil {
			events, err = os.ReadFile(d.serviceFile(name, "events.jsonl"))
		}
		if err == nil {
			if tokens, err = os.ReadFile(d.serviceFile(name, "tokens.json")); errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		}
		had := map[string]bool{} // manifests that were there with the record
		blobs, _ := os.ReadDir(d.serviceFile(name, "images", "blobs", "sha256"))
		for _, b := range blobs {
			had["sha256:"+b.Name()] = true
		}
		unlock()
		if errors.Is(err, fs.ErrNotExist) {
			continue // nothing was accepted yet
		} else if err != nil {
			return fmt.Errorf("backing up %s: %w", name, err)
		}
		r := &record{}
		if err = decodeRecord(main, r); err == nil && tokens != nil {
			err = decodeRecord(tokens, &tokenFile{})
		}
		if err != nil {
			return fmt.Errorf("backing up %s: %w; mend it first (toad fsck)", name, err)
		}
		if tokens != nil {
			err = add(filepath.Join("services", name, "tokens.json"), tokens)
		}
		if err := errors.Join(err, add(filepath.Join("services", name, "service.json"), main), add(filepath.Join("services", name, "events.jsonl"), events)); err != nil {
			return fmt.Errorf("backing up %s: %w", name, err)
		}
		for _, sub := range []string{"revisions", "operations", "keys", "images"} {
			err := filepath.WalkDir(d.serviceFile(name, sub), func(path string, e fs.DirEntry, err error) error {
				if errors.Is(err, fs.ErrNotExist) {
					return nil
				} else if err != nil || e.IsDir() || temporaryName.MatchString(e.Name()) {
					return err
				}
				rel, _ := filepath.Rel(d.path, path)
				return addFile(rel)
			})
			if err != nil {
				return fmt.Errorf("backing up %s: %w; begin again", name, err)
			}
		}
		// A promotion meanwhile takes away the bytes that were retained when the record was read.
		unlock = lock(name)
		after := &record{}
		err = readRecord(d.serviceFile(name, "service.json"), after)
		unlock()
		if err != nil {
			return fmt.Errorf("backing up %s: %w", name, err)
		}
		if after.Current != nil && (r.Current == nil || r.Current.Generation != after.Current.Generation) {
			return fmt.Errorf("backing up %s: it was promoted meanwhile, and its operation may be in the backup; begin again", name)
		}
		for _, p := range []*promotedRevision{r.Current, r.Rollback} {
			if p == nil || r.Retired != nil {
				continue
			}
			if _, err := os.Stat(blobPath(d.serviceFile(name, "images"), p.digest())); errors.Is(err, fs.ErrNotExist) && had[p.digest()] {
				return fmt.Errorf("backing up %s: it was promoted meanwhile; begin again", name)
			}
		}
	}
	if err := add(backupEnd, nil); err != nil {
		return fmt.Errorf("backing up: %w", err)
	}
	return tw.Close()
}

// restoreBackup reads a backup and puts back what is missing or damaged. Of a service whose record is whole
// that is what is immutable, and its tokens. The caller holds both locks and no server runs.
func (d *dataDir) restoreBackup(r io.Reader, running func(service string) ([]container, error), now time.Time) (done []string, err error) {
	tmp := filepath.Join(d.path, "restore")
	if err := errors.Join(os.RemoveAll(tmp), makeDir(filepath.Join(tmp, "services"))); err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	if err := unpackBackup(r, tmp); err != nil {
		return nil, fmt.Errorf("reading the backup: %w", err)
	}
	b := &dataDir{path: tmp, quadlets: d.quadlets}
	if b.id, err = b.readID(); err != nil {
		return nil, fmt.Errorf("reading the backup: %w", err)
	}
	switch d.id, err = d.readID(); {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, errCorrupt):
		d.id = b.id
		if err := writeFile(filepath.Join(d.path, "id"), []byte(d.id+"\n")); err != nil {
			return nil, err
		}
		done = append(done, "id")
	case err != nil:
		return nil, err
	case d.id != b.id:
		return nil, errors.New("restoring: the backup is of another Toad (its id differs); nothing was changed")
	}
	names, err := b.services()
	if err != nil {
		return done, err
	}
	for _, name := range names {
		cur := &record{}
		whole := readRecord(d.serviceFile(name, "service.json"), cur) == nil && cur.check() == nil
		if !whole {
			cur = nil
		}
		mended, err := d.mendFrom(b, name, cur, now)
		for _, file := range mended {
			done = append(done, name+": "+file+" was put back")
		}
		if err != nil {
			return done, fmt.Errorf("restoring %s: %w", name, err)
		}
		if whole {
			put, err := d.restoreTokensOf(b, name, now)
			if err != nil {
				return done, err
			}
			switch {
			case put:
				done = append(done, name+": its tokens were put back")
			case len(mended) == 0:
				done = append(done, name+": left alone, its record is whole")
			}
			continue
		}
		from := &record{}
		if err := readRecord(b.serviceFile(name, "service.json"), from); err != nil {
			return done, fmt.Errorf("restoring %s: the backup's record: %w", name, err)
		}
		// Tokens first: a log out of the backup does not know what was revoked since, and vouches for none.
		if err := makeDir(d.serviceFile(name)); err != nil {
			return done, err
		}
		if _, err := d.restoreTokensOf(b, name, now); err != nil {
			return done, err
		}
		// What is immutable is added where it is missing; a log that goes on is never cut.
		err = filepath.WalkDir(b.serviceFile(name), func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			rel, _ := filepath.Rel(tmp, path)
			to := filepath.Join(d.path, rel)
			if _, err := os.Lstat(to); err == nil || filepath.Base(rel) == "service.json" || filepath.Base(rel) == "tokens.json" {
				return nil
			}
			if err := makeDir(filepath.Dir(to)); err != nil {
				return err
			}
			if err := os.Rename(path, to); err != nil {
				return err
			}
			return syncDir(filepath.Dir(to))
		})
		if err != nil {
			return done, fmt.Errorf("restoring %s: %w", name, err)
		}
		list, err := running(name)
		if err != nil {
			return done, fmt.Errorf("restoring %s: what runs as the service is not known: %w", name, err)
		}
		if err := d.restoreService(name, from, list, now); err != nil {
			return done, err
		}
		done = append(done, name+": put back")
	}
	return done, nil
}

// unpackBackup writes the members of a backup into a directory of its own.
func unpackBackup(r io.Reader, dir string) error {
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		switch {
		case errors.Is(err, io.EOF):
			return errors.New("it is cut off; nothing was changed")
		case err != nil:
			return err
		case h.Name == backupEnd:
			return nil
		case !filepath.IsLocal(h.Name) || h.Typeflag != tar.TypeReg || h.Name != "id" && !strings.HasPrefix(h.Name, "services/"):
			return fmt.Errorf("%q does not belong into one", h.Name)
		}
		path := filepath.Join(dir, h.Name)
		if err := makeDir(filepath.Dir(path)); err != nil {
			return err
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		if _, err = io.Copy(f, tr); err == nil {
			err = f.Sync()
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
}

// mendFrom puts back out of a backup what never changes and is damaged, and of what is missing beside a whole
// record r the keys and the revisions that it refers to: anything else may have been pruned. It returns what it
// put back.
func (d *dataDir) mendFrom(backup *dataDir, service string, r *record, now time.Time) (mended []string, err error) {
	refers := func(g int64) bool {
		op, kept := r.active(), retainedBy(r)
		return slices.Contains(kept[:], g) || r.Held != nil && r.Held.Revision.Generation == g ||
			op != nil && op.State != preparing && op.Candidate.Generation == g
	}
	read := func(d *dataDir, sub, name string) error {
		switch {
		case sub == "revisions":
			g, _ := strconv.ParseInt(strings.TrimSuffix(name, ".json"), 10, 64)
			_, err := d.revision(service, g)
			return err
		case sub == "operations":
			_, err := d.operation(service, strings.TrimSuffix(name, ".json"))
			return err
		}
		return readRecord(d.serviceFile(service, sub, name), &keyFile{})
	}
	for sub, form := range map[string]*regexp.Regexp{"revisions": revisionFile, "operations": operationFile, "keys": keyFileName} {
		entries, _ := os.ReadDir(backup.serviceFile(service, sub))
		for _, e := range entries {
			name := e.Name()
			if !form.MatchString(name) {
				continue
			}
			if err := read(d, sub, name); err == nil || errors.Is(err, errNewer) || read(backup, sub, name) != nil {
				continue
			}
			files := []string{name}
			if sub == "revisions" { // the record that vouches for the unit is the last, as when it was made
				files = []string{strings.TrimSuffix(name, ".json") + ".container", name}
			}
			_, serr := os.Lstat(d.serviceFile(service, sub, name))
			g, _ := strconv.ParseInt(strings.TrimSuffix(name, ".json"), 10, 64)
			if errors.Is(serr, fs.ErrNotExist) && (r == nil || sub == "operations" || sub == "revisions" && !refers(g)) {
				continue
			}
			if err := makeDir(d.serviceFile(service, sub)); err != nil {
				return mended, err
			}
			for _, file := range files {
				b, err := os.ReadFile(backup.serviceFile(service, sub, file))
				if err != nil {
					return mended, err
				}
				to := d.serviceFile(service, sub, file)
				if err := setAside(to, now.UTC().Format("20060102T150405")); err != nil {
					return mended, err
				}
				if err := writeFile(to, b); err != nil {
					return mended, err
				}
			}
			mended = append(mended, filepath.Join(sub, name))
		}
	}
	slices.Sort(mended)
	return mended, nil
}

// restoreTokensOf puts a service's tokens.json back from a backup, if it is missing or damaged.
func (d *dataDir) restoreTokensOf(backup *dataDir, service string, now time.Time) (bool, error) {
	from, err := backup.tokens(service, "tokens.json")
	if err != nil {
		return false, fmt.Errorf("restoring %s: the backup's tokens: %w", service, err)
	}
	if cur, err := d.tokens(service, "tokens.json"); err == nil && cur.SHA256 != "" || len(from.Tokens) == 0 {
		return false, nil
	}
	return true, d.restoreTokens(from, now)
}

// runningAs lists the containers of a service for evidence; a Podman that does not answer is an error,
// because what runs must be known.
func runningAs(ctx context.Context, c containers, service string) ([]container, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return c.Containers(ctx, service, service+".service", service)
}

// lockService keeps a service's record as it is while it is read, or that of Toad's own events for "".
func (d *daemon) lockService(name string) (unlock func()) {
	if name == "" {
		d.data.own.mu.Lock()
		return d.data.own.mu.Unlock
	}
	s := d.known(name)
	if s == nil {
		return func() {}
	}
	s.mu.Lock()
	return s.mu.Unlock
}

// restore puts a named record back while the server runs. A service.json that is damaged on the disk alone is
// written again from memory, which is younger than any predecessor; whatever else is put back, the service
// begins from the disk afterwards, and commits nothing of what it knew before.
func (d *daemon) restore(ctx context.Context, name string) (string, error) {
	var s *service
	parts := strings.Split(filepath.Clean(name), string(filepath.Separator))
	if n := len(parts); n >= 2 {
		s = d.known(parts[n-2])
	}
	if s == nil {
		return "", fmt.Errorf("restoring %s: no service of this Toad has such a record", name)
	}
	list, lerr := runningAs(ctx, d.host.containers, s.name)
	running := func(string) ([]container, error) { return list, lerr }
	now := d.host.wall().UTC().Truncate(time.Millisecond)
	s.mu.Lock()
	defer s.mu.Unlock()
	main := filepath.Base(name) == "service.json"
	if r := s.rec.Load(); main && s.broken == nil && r != nil && s.usable() == nil {
		ondisk := &record{}
		if err := readRecord(s.data.serviceFile(s.name, "service.json"), ondisk); err != nil {
			if head, err := verifyEvents(s.data.serviceFile(s.name, "events.jsonl")); err == nil && head == r.eventEnd() {
				if err := s.commitLocked(unchanged, event{Type: "restore", Actor: "local", Detail: "written again from the running server's memory"}); err != nil {
					return "", err
				}
				return filepath.Join("services", s.name, "service.json") + " from the running server's memory", nil
			}
		}
		if op := r.active(); op != nil {
			return "", fmt.Errorf("restoring %s: operation %s is under way and would be ended; wait for its end", name, op.ID)
		}
	}
	restored, err := d.data.restoreNamed(name, running, now)
	if err != nil && !errors.Is(err, errStorage) {
		return "", err // nothing was changed
	}
	if main {
		s.broken = fmt.Errorf("%w: service.json was put back", errStorage)
	} else {
		s.readTokens()
		s.tryTellTokens()
	}
	s.poke()
	return restored, err
}

// postFsck checks every record, and puts one back if it is named.
func (d *daemon) postFsck(w http.ResponseWriter, r *http.Request) error {
	b, err := readBody(r)
	if err != nil {
		return err
	}
	var req fsckRequest
	if b = bytes.TrimSpace(b); len(b) > 0 && string(b) != "{}" {
		r.Body = io.NopCloser(bytes.NewReader(b))
		if err := decode(r, &req, "restore"); err != nil {
			return err
		}
	}
	answer := wireFsck{}
	if req.Restore != "" {
		if answer.Restored, err = d.restore(r.Context(), req.Restore); err != nil {
			return invalid("restore", "%v", err).because(err) // this socket is local: it may name files
		}
		d.log.Warn("a record was put back", "restored", answer.Restored)
	}
	answer.Findings = append([]finding{}, d.data.fsck(d.lockService)...)
	answer.OK = len(answer.Findings) == 0
	return writeJSON(w, http.StatusOK, answer)
}

func (d *daemon) getBackup(w http.ResponseWriter, _ *http.Request) error {
	setType(w, "application/x-tar")
	if err := d.data.backup(w, d.lockService, d.host.wall().UTC()); err != nil {
		d.log.Error("backing up", "err", err)
		panic(http.ErrAbortHandler) // the answer is cut off, and without its last member no backup
	}
	return nil
}

// dataFlags are what a command needs that works on the directory itself because no server runs.
type dataFlags struct{ data, quadlets, podman string }

func (f *dataFlags) register(fs *flag.FlagSet) {
	fs.StringVar(&f.data, "data", "/data", "`directory` of the records, if no server runs")
	fs.StringVar(&f.quadlets, "quadlets", "/quadlet", "`directory` of the units, if no server runs")
	fs.StringVar(&f.podman, "podman", "unix:///run/toad/podman/podman.sock", "`URL` of Podman's API, if no server runs")
}

// noLock is the lock of who has the directory alone.
func noLock(string) (unlock func()) { return func() {} }

// alone opens the directory for one command, with both locks.
func (f *dataFlags) alone() (*dataDir, func(service string) ([]container, error), error) {
	d, err := lockData(f.data, f.quadlets)
	if err != nil {
		return nil, nil, err
	}
	p := newPodman(f.podman)
	return d, func(service string) ([]container, error) { return runningAs(context.Background(), p, service) }, nil
}

func fsckCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("fsck")
	c := localClient(fs, stdout, stderr)
	var f dataFlags
	f.register(fs)
	restore := fs.String("restore", "", "put this record back from its predecessor: services/SERVICE/service.json or tokens.json")
	cmd := newCommand(fs, "", "check every record; changes nothing without --restore", "", func(ctx context.Context, _ []string) error {
		var answer wireFsck
		raw, err := c.call(ctx, http.MethodPost, "/v1/fsck", fsckRequest{*restore}, &answer, 10*time.Minute)
		if c.noServer(err) { // do it here, under both locks
			d, running, err := f.alone()
			if err != nil {
				return err
			}
			defer d.close()
			if *restore != "" {
				if d.id, err = d.readID(); err != nil {
					return err
				}
				if answer.Restored, err = d.restoreNamed(*restore, running, time.Now().UTC().Truncate(time.Millisecond)); err != nil {
					return err
				}
			}
			answer.Findings = append([]finding{}, d.fsck(noLock)...)
			answer.OK = len(answer.Findings) == 0
			if raw, err = json.Marshal(answer); err != nil {
				return err
			}
		} else if err != nil {
			return c.explain(err, "fsck", "")
		}
		var lines []string
		if answer.Restored != "" {
			lines = append(lines, "restored "+answer.Restored)
		}
		for _, p := range answer.Findings {
			lines = append(lines, p.File+": "+p.Problem)
		}
		if answer.OK {
			lines = append(lines, "every record is whole")
		}
		c.answer(raw, lines...)
		if !answer.OK {
			return &commandError{status: exitRefused}
		}
		return nil
	})
	cmd.ShortUsage = "toad fsck [--restore FILE] [FLAGS]"
	return cmd
}

func backupCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("backup")
	c := localClient(fs, stdout, stderr)
	var f dataFlags
	f.register(fs)
	cmd := newCommand(fs, "", "write every record, and the images that a rollback needs, as a tar", "", func(ctx context.Context, _ []string) error {
		if isTerminal(stdout) {
			return usageError("backup: standard output is a terminal", "toad backup > FILE")
		}
		resp, err := c.open(ctx, http.MethodGet, "/v1/backup", nil)
		if err == nil {
			defer resp.Body.Close()
			if _, err := io.Copy(stdout, resp.Body); err != nil {
				return &commandError{status: exitRefused, text: "backup: cut off: " + err.Error(), hint: "see the journal of toad; what was written is no backup"}
			}
			return nil
		}
		if !c.noServer(err) {
			return c.explain(err, "backup", "")
		}
		d, _, err := f.alone()
		if err != nil {
			return err
		}
		defer d.close()
		return d.backup(stdout, noLock, time.Now().UTC())
	})
	cmd.ShortUsage = "toad backup [FLAGS] > FILE"
	return cmd
}

func restoreCmd(stdin io.Reader, stdout io.Writer) *ffcli.Command {
	fs := newFlags("restore")
	var f dataFlags
	f.register(fs)
	cmd := newCommand(fs, "", "put back from a backup what is missing or damaged; no server may run", "", func(context.Context, []string) error {
		d, running, err := f.alone()
		if err != nil {
			return err
		}
		defer d.close()
		done, err := d.restoreBackup(stdin, running, time.Now().UTC().Truncate(time.Millisecond))
		for _, line := range done {
			printLine(stdout, "%s", line)
		}
		return err
	})
	cmd.ShortUsage = "toad restore [FLAGS] < FILE"
	return cmd
}

// wireAudit tells of each log of events whether it is whole.
type wireAudit struct {
	OK   bool        `json:"ok"`
	Logs []wireChain `json:"logs"`
}

type wireChain struct {
	File    string `json:"file"` // below the data directory
	Service string `json:"service,omitempty"`
	Events  int64  `json:"events"`         // that follow from each other, from the first on
	Hash    string `json:"hash,omitempty"` // of the last of them
	Line    int64  `json:"line,omitempty"` // the first that is not as it should be
	Problem string `json:"problem,omitempty"`
}

// audit follows the chain of a service's events, or of Toad's own for "", to the head that the record beside
// it names. lock keeps record and log in step while both are looked at; the lines are read after it, up to
// where the log then ended, so that a long one holds up nobody.
func (d *dataDir) audit(service string, lock func(service string) (unlock func())) wireChain {
	path, by := d.own.path, d.own.headPath
	if service != "" {
		path, by = d.serviceFile(service, "events.jsonl"), d.serviceFile(service, "service.json")
	}
	unlock := lock(service)
	var end eventHead
	var err error
	if service == "" {
		r := &ownRecord{}
		err = readRecord(by, r)
		end = endOf(r.EventHead, r.Events)
	} else {
		r := &record{}
		err = readRecord(by, r)
		end = r.eventEnd()
	}
	size := int64(0)
	if st, serr := os.Stat(path); serr == nil {
		size = st.Size()
	}
	unlock()

	c := wireChain{Service: service}
	c.File, _ = filepath.Rel(d.path, path)
	head, verr := verifyEventsTo(path, size)
	c.Events, c.Hash = head.Cursor, head.Hash
	var bad *brokenChain
	switch {
	case errors.As(verr, &bad):
		c.Line, c.Problem = bad.line, bad.Error()
	case verr != nil:
		c.Problem = verr.Error()
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		c.Problem = fmt.Sprintf("every line follows, but which is the last cannot be told: %v", err)
	case service == "" && err != nil: // written by a Toad that kept no such record
	case head == end:
	default:
		bad = endsElsewhere(head, end, filepath.Base(by))
		c.Line, c.Problem = bad.line, bad.Error()
	}
	return c
}

// getAudit verifies the log of one service, or all of them and Toad's own.
func (d *daemon) getAudit(w http.ResponseWriter, r *http.Request) error {
	a := wireAudit{OK: true, Logs: []wireChain{}}
	add := func(c wireChain) {
		a.Logs, a.OK = append(a.Logs, c), a.OK && c.Problem == ""
	}
	if name := r.FormValue("service"); name != "" {
		s, err := d.service(name)
		if err != nil {
			return err
		}
		add(d.data.audit(s.name, d.lockService))
		return writeJSON(w, http.StatusOK, a)
	}
	add(d.data.audit("", d.lockService))
	for _, s := range d.all() {
		add(d.data.audit(s.name, d.lockService))
	}
	return writeJSON(w, http.StatusOK, a)
}

func auditCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("audit")
	c := newClient(fs, stdout, stderr)
	var f dataFlags
	f.register(fs)
	long := "Who keeps the count and the hash it prints can tell later that the log begins with the same lines."
	return newCommand(fs, "verify [SERVICE]", "see that no line of the event logs was changed, removed or moved", long, func(ctx context.Context, args []string) error {
		if args[0] != "verify" {
			return usageError("audit: verify is missing", "toad audit verify [SERVICE]")
		}
		service, query := "", ""
		if len(args) > 1 {
			service, query = args[1], "?service="+args[1]
		}
		var a wireAudit
		raw, err := c.call(ctx, http.MethodGet, "/v1/audit"+query, nil, &a, 10*time.Minute)
		if c.noServer(err) { // do it here, under both locks
			d, _, err := f.alone()
			if err != nil {
				return err
			}
			defer d.close()
			names, err := d.services()
			if err != nil {
				return err
			}
			if service == "" {
				names = append([]string{""}, names...)
			} else if names = slices.DeleteFunc(names, func(n string) bool { return n != service }); len(names) == 0 {
				return fmt.Errorf("audit: there is no service %s", service)
			}
			for _, name := range names {
				a.Logs = append(a.Logs, d.audit(name, noLock))
			}
			a.OK = !slices.ContainsFunc(a.Logs, func(l wireChain) bool { return l.Problem != "" })
			if raw, err = json.Marshal(a); err != nil {
				return err
			}
		} else if err != nil {
			return c.explain(err, "audit", service)
		}
		var lines []string
		for _, l := range a.Logs {
			text := fmt.Sprintf("whole, %d events, hash %s", l.Events, cmp.Or(l.Hash, "-"))
			lines = append(lines, l.File+": "+cmp.Or(l.Problem, text))
		}
		c.answer(raw, lines...)
		if !a.OK {
			return &commandError{status: exitRefused}
		}
		return nil
	})
}
