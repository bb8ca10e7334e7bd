// events.go keeps the append-only, hash-chained event log and the operation logs, and the texts of both and
// of failures, which token holders and the page can read: fixed words around typed values and other public
// words, never the text of a host's error.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

var errNotFound = errors.New("not found")

// codedError is a failure with a public half (code, summary, hint) and a private cause that goes
// to the journal only.
type codedError struct {
	failure
	err error
}

func (e *codedError) Error() string {
	if e.err == nil {
		return e.Code + ": " + e.Summary
	}
	return e.Code + ": " + e.Summary + ": " + e.err.Error()
}

func (e *codedError) Unwrap() error { return e.err }

// failure is why an operation did not do what was asked, in public words.
type failure struct {
	Code    string `json:"code"`
	Summary string `json:"summary"`
	Hint    string `json:"hint,omitempty"`
	Cause   string `json:"cause,omitempty"` // the code that began a rollback which then failed
}

// failed makes the error of a step: the public text of the code with its arguments, and the private
// cause. Arguments must be public themselves: digests, names, numbers, durations.
func failed(code string, err error, args ...any) error {
	t, ok := publicTexts[code]
	if !ok {
		panic("no public text for failure code " + code)
	}
	return &codedError{failure{Code: code, Summary: fmt.Sprintf(t.summary, args...), Hint: t.hint}, err}
}

// publicTexts holds what is said of each failure code: the summary with its arguments, and a hint.
var publicTexts = map[string]struct{ summary, hint string }{
	"volume_not_covered":      {"the image declares the volume %s, which no mount of the enrollment covers: its data would be lost at each stop", "enroll a Volume= for it, or build the image without VOLUME"},
	"unit_not_owned":          {"the unit %s exists and was not written by this Toad", "remove it, or enroll the service under another unit name"},
	"unit_invalid":            {"the unit of this revision is refused by the host: %s", "ask the operator for the local log, and mend the template"},
	"foreign_container":       {"container %s (%s) has this service's name or labels and is not run by its unit", "stop and remove it, then deploy again"},
	"stale_enrollment":        {"the enrollment of the service changed or went away after the request was accepted", "deploy again"},
	"termination_unconfirmed": {"the instance could not be proven dead within %s: %s", "the service is held until it is gone; Toad goes on stopping it"},
	"start_failed":            {"the candidate never became active: systemd says %s, result %s", "see the candidate's own output on the host"},
	"unit_failed":             {"the candidate's unit ended: systemd says %s, result %s", "see the candidate's own output on the host"},
	"startup_deadline":        {"the candidate was not ready once within the startup deadline of %s; last: %s", ""},
	"rollout_deadline":        {"the candidate was not ready for %s without a break within the rollout deadline of %s; last: %s", ""},
	"restart_budget":          {"the candidate restarted %d times, the budget is %d", "see the candidate's own output on the host"},
	"requested":               {"ended by request of %s", ""},
	"no_rollback_target":      {"there is no earlier revision to go back to: the candidate was stopped and its unit removed", "deploy a working image"},
	"rollback_failed":         {"going back to generation %d failed: %s", "it is not tried again: deploy a working image, or mend the host and deploy"},
	"interrupted":             {"the operation could not be continued: %s", "deploy again"},
	"state_unavailable":       {"the records of the service could not be written", "free some space on the host, then deploy again"},

	"fetch_failed":         {"%s could not be fetched from the registry: %s", "deploy again once the registry is well; nothing running was touched"},
	"load_failed":          {"the image could not be loaded into Podman", "see that the host's /var/tmp has room for three times the image"},
	"digest_mismatch":      {"what the registry or Podman holds under %s is not what the digest says", "push the image again, and look into the registry"},
	"not_single_platform":  {"%s is an index of several platforms; its image for %s: %s", "deploy the digest of one platform's manifest"},
	"wrong_platform":       {"%s is an image for %s, and this host is %s", "deploy the digest of this platform's manifest"},
	"unsupported_manifest": {"%s is not an image that Toad can run: %s", "push an OCI or Docker (schema 2) image of one platform"},
	"image_too_large":      {"the image of %s has %d bytes: %s", "make the image smaller, or have the limit raised or space freed"},
}

// logTexts holds the fixed vocabulary of operation logs.
var logTexts = map[string]string{
	"accepted":            "deployment of %s accepted as generation %d",
	"rollback_accepted":   "rollback to %s accepted as generation %d",
	"resumed":             "Toad started again and continues in state %s",
	"fetching":            "fetching %s",
	"fetched":             "image is in the local layout: %d bytes",
	"loading":             "loading the image into Podman",
	"target_ready":        "generation %d can be restored",
	"target_damaged":      "generation %d could not be restored: %s",
	"target_repaired":     "the image of generation %d was damaged or missing and was fetched again",
	"verified":            "image and unit are verified; nothing running was touched yet",
	"stopping":            "stopping the instance of generation %d",
	"stopping_nothing":    "no instance is expected; proving that none is there",
	"terminated":          "termination is confirmed",
	"still_there":         "termination is not confirmed yet: %s",
	"unit_written":        "the unit of generation %d is written and read back",
	"unit_removed":        "the unit is removed",
	"starting":            "starting generation %d",
	"started":             "systemd took the start",
	"restart":             "the instance restarted: %d of %d restarts",
	"ready":               "ready: the stability window of %s begins",
	"not_ready":           "not ready: %s",
	"window_reset":        "the stability window begins again after %s: %s",
	"stable":              "ready for %s without a break",
	"promoting_again":     "the last look before promotion failed: %s",
	"promoted":            "promoted: generation %d is current",
	"installed":           "the promoted unit is in place and starts at boot",
	"rollback_requested":  "%s asked to end the operation",
	"rolling_back":        "rolling back to generation %d because of %s",
	"rolling_back_none":   "ending without a revision to go back to, because of %s",
	"already_there":       "the instance of generation %d runs already and is left alone",
	"restored":            "generation %d was seen ready",
	"rolled_back":         "rolled back to generation %d",
	"failed":              "failed: %s",
	"boot":                "the host was booted: the candidate is started again under the original deadline",
	"boot_late":           "the host was booted, and the original deadline leaves no whole stability window",
	"host_not_answering":  "the host does not answer",
	"disk_full":           "there is no room on the disk of the records; trying again until the deadline",
	"held":                "the service is held until the instance is gone",
	"image_missing_again": "the image had gone from Podman and was loaded again",
}

// event is one line of a service's event log. The hash is over the previous hash and the line
// without it, so that no line can be changed, removed or reordered unseen.
type event struct {
	Cursor    int64     `json:"cursor"`
	ID        string    `json:"id"`
	At        time.Time `json:"at"`
	Type      string    `json:"type"`
	Service   string    `json:"service"`
	Operation string    `json:"operation_id"`
	Actor     string    `json:"actor"`
	Detail    string    `json:"detail"`
	Count     int64     `json:"count,omitempty"` // of so many like it that came as one, this is the last
	Prev      string    `json:"prev"`
	Hash      string    `json:"hash"`
}

// eventHead is the last line of an event log as the commit that follows it knows it.
type eventHead struct {
	Cursor int64  `json:"cursor"`
	Hash   string `json:"hash"`
}

// eventEnd is the last event that the record names.
func (r *record) eventEnd() eventHead { return endOf(r.EventHead, r.Events) }

func endOf(head eventHead, events []event) eventHead {
	if n := len(events); n > 0 {
		return eventHead{events[n-1].Cursor, events[n-1].Hash}
	}
	return head
}

// seal sets the event's place in the chain after head, and returns the new head.
func (e *event) seal(head eventHead) eventHead {
	e.Cursor, e.Prev = head.Cursor+1, head.Hash
	e.ID = fmt.Sprintf("%s-%d", e.Service, e.Cursor)
	e.Hash = ""
	line, _ := json.Marshal(e)
	e.Hash = sumHex(append([]byte(e.Prev), line...))
	return eventHead{e.Cursor, e.Hash}
}

// eventLog is an events.jsonl as it is known to be on disk. One writer at a time appends; whoever reads
// is given what is durable, and waits for no write.
type eventLog struct {
	path string

	mu     sync.Mutex // guards what follows, never held across a call to the disk; the writer alone sets it
	size   int64      // of whole, durable lines
	head   eventHead  // of the last of them
	recent []event    // the last of them, oldest first: who follows the log is served without the disk
	grown  chan struct{}
}

// keptEvents is how many of the last events stay in memory.
const keptEvents = 64

// openEvents brings the log in step with the record: a torn last line, which a kill leaves, is cut
// (its event is in the record), and what the last commit made known is appended if it is missing. A
// log whose end is not what the record says is refused.
func (d *dataDir) openEvents(r *record) (*eventLog, error) {
	l, err := readEnd(d.serviceFile(r.Service, "events.jsonl"))
	if err == nil {
		err = l.inStep(r.EventHead, r.Events, "service.json")
	}
	if err != nil {
		return nil, err
	}
	return l, nil
}

// inStep appends what the log lacks of the events that a record names, which follow head.
func (l *eventLog) inStep(head eventHead, events []event, record string) error {
	known := l.head == head
	for _, e := range events {
		known = known || l.head == eventHead{e.Cursor, e.Hash}
	}
	if !known {
		return fmt.Errorf("reading %s: %w: it ends at cursor %d, which is not what %s says", l.path, errCorrupt, l.head.Cursor, record)
	}
	var missing []event
	for _, e := range events {
		if e.Cursor > l.head.Cursor {
			missing = append(missing, e)
		}
	}
	if len(missing) == 0 && l.size > 0 {
		return syncFile(l.path) // what was read counts only once it is durable
	}
	return l.append(missing)
}

// readEnd finds the last whole line. Size is where it ends, so that a torn one is cut by the next append.
func readEnd(path string) (*eventLog, error) {
	l := &eventLog{path: path, grown: make(chan struct{})}
	b, err := tail(l.path, 1<<20)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, storageError("reading", l.path, err)
	}
	end := bytes.LastIndexByte(b, '\n') + 1
	if st, err := os.Stat(l.path); err == nil {
		l.size = st.Size() - int64(len(b)) + int64(end)
	}
	if b = b[:end]; len(b) > 0 {
		var e event
		if err := json.Unmarshal(b[bytes.LastIndexByte(b[:end-1], '\n')+1:], &e); err != nil {
			return nil, fmt.Errorf("reading %s: %w: %w", l.path, errCorrupt, err)
		}
		l.head = eventHead{e.Cursor, e.Hash}
	}
	return l, nil
}

// append adds sealed events and is durable when it returns nil.
func (l *eventLog) append(events []event) error {
	if len(events) == 0 {
		return nil
	}
	var lines []byte
	for _, e := range events {
		line, err := json.Marshal(e)
		if err != nil {
			return fmt.Errorf("appending to %s: %w", l.path, err)
		}
		lines = append(append(lines, line...), '\n')
	}
	if err := appendDurably(l.path, l.size, lines); err != nil {
		return err
	}
	e := events[len(events)-1]
	l.mu.Lock()
	l.size, l.head = l.size+int64(len(lines)), eventHead{e.Cursor, e.Hash}
	l.recent = slices.Concat(l.recent, events) // who was given the old ones goes on reading them
	l.recent = l.recent[max(0, len(l.recent)-keptEvents):]
	l.mu.Unlock()
	l.wake()
	return nil
}

// wake lets everyone who waits for more look again.
func (l *eventLog) wake() {
	l.mu.Lock()
	close(l.grown)
	l.grown = make(chan struct{})
	l.mu.Unlock()
}

// since returns at most limit events after a cursor, the end of the log, and a channel that is closed
// when there are more. A cursor beyond the end has none.
func (l *eventLog) since(after int64, limit int) (events []event, end int64, grown <-chan struct{}, err error) {
	l.mu.Lock()
	size, recent := l.size, l.recent
	end, grown = l.head.Cursor, l.grown
	l.mu.Unlock()
	switch {
	case after >= end:
	case len(recent) > 0 && after >= recent[0].Cursor-1:
		events = recent[after-recent[0].Cursor+1:]
		events = events[:min(len(events), limit)]
	default:
		events, err = readEvents(l.path, size, after, limit)
	}
	return events, end, grown, err
}

// readEvents reads at most limit events after a cursor from the first size bytes of a log.
func readEvents(path string, size, after int64, limit int) ([]event, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading events: %w", err)
	}
	defer f.Close()
	at, err := seekEvent(f, size, after)
	var events []event
	for r := bufio.NewReader(io.NewSectionReader(f, at, size-at)); err == nil && len(events) < limit; {
		var line []byte
		if line, err = r.ReadBytes('\n'); err == io.EOF && len(line) == 0 {
			return events, nil
		}
		var e event
		if err == nil {
			err = json.Unmarshal(line, &e)
		}
		if err == nil && e.Cursor > after {
			if want := after + 1 + int64(len(events)); e.Cursor != want {
				err = fmt.Errorf("%w: cursor %d where %d belongs", errCorrupt, e.Cursor, want)
			}
			events = append(events, e)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return events, nil
}

// seekEvent finds the beginning of a line at or a little before the one that follows a cursor. Cursors grow
// with the lines, so it halves the file: a log of a gigabyte costs some fifteen small reads.
func seekEvent(f io.ReaderAt, size, after int64) (int64, error) {
	low, high := int64(0), size
	for high-low > 64<<10 {
		middle := low + (high-low)/2
		r := bufio.NewReader(io.NewSectionReader(f, middle, high-middle))
		cut, err := r.ReadBytes('\n')
		var line []byte
		if err == nil {
			line, err = r.ReadBytes('\n')
		}
		var e struct{ Cursor int64 }
		switch {
		case err == io.EOF: // no whole line begins and ends there
			high = middle
			continue
		case err != nil:
			return 0, err
		}
		if err := json.Unmarshal(line, &e); err != nil {
			return 0, fmt.Errorf("%w: %w", errCorrupt, err)
		}
		if e.Cursor > after {
			high = middle
		} else {
			low = middle + int64(len(cut))
		}
	}
	return low, nil
}

// ownLog is Toad's own event log. What it is told is durable when it returns.
type ownLog struct {
	path, headPath string
	tally          tally

	log atomic.Pointer[eventLog] // nil until it was read, and after a write that failed

	mu     sync.Mutex // one writer at a time; set under it:
	old    *eventLog  // the one before, of which some may wait for more
	unsure *ownAttempt
}

// ownRecord is events.head.json: how Toad's own event log ends, as service.json says it of a service's.
type ownRecord struct {
	Version   int       `json:"version"`
	EventHead eventHead `json:"event_head"` // the log's head before the events below
	Events    []event   `json:"events"`     // what was told last
	SHA256    string    `json:"sha256"`
}

// ownAttempt is a write of which the disk alone knows what became.
type ownAttempt struct {
	end    eventHead
	settle func(done bool) // of what it took from the tally
}

// read reads the log's end, and brings it in step with what its record says.
func (o *ownLog) read() error {
	l, err := readEnd(o.path)
	if err != nil {
		return err
	}
	r := &ownRecord{}
	switch err := readRecord(o.headPath, r); {
	case errors.Is(err, fs.ErrNotExist): // of a Toad that kept none: the next event makes it
		r.EventHead = l.head
	case err != nil:
		return err
	}
	if err := l.inStep(r.EventHead, r.Events, filepath.Base(o.headPath)); err != nil {
		return err
	}
	if a := o.unsure; a != nil {
		a.settle(l.head == a.end)
		o.unsure = nil
	}
	if o.log.Store(l); o.old != nil {
		o.old.wake() // who waits for more of it goes on with the new one
		o.old = nil
	}
	return nil
}

// open is the log, read if it is not known.
func (o *ownLog) open() (*eventLog, error) {
	if l := o.log.Load(); l != nil {
		return l, nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.opened()
}

func (o *ownLog) opened() (*eventLog, error) {
	if o.log.Load() == nil {
		if err := o.read(); err != nil {
			return nil, err
		}
	}
	return o.log.Load(), nil
}

// write appends events, and with them those that were counted and are due.
func (o *ownLog) write(events ...event) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	l, err := o.opened()
	if err != nil {
		return err
	}
	due, settle := o.tally.take(nil)
	events = append(events, due...)
	if len(events) == 0 {
		return nil
	}
	r := &ownRecord{Version: recordVersion, EventHead: l.head, Events: events}
	head := l.head
	for i := range events {
		events[i].At = time.Now().UTC().Truncate(time.Millisecond)
		head = events[i].seal(head)
	}
	if err := writeRecord(o.headPath, r); err != nil {
		o.unsure, o.old = &ownAttempt{head, settle}, l
		o.log.Store(nil)
		return err
	}
	settle(true) // the log lacks them at most until it is read again
	if err := l.append(events); err != nil {
		o.old = l
		o.log.Store(nil)
		return err
	}
	return nil
}

// floods tells that events of a type may come in floods.
func floods(typ string) bool {
	switch typ {
	case "restart", "unhealthy", "healthy", "refused", "denied":
		return true
	}
	return false
}

// tallyPause is the least time between two events of one type and actor.
const tallyPause = time.Minute

// tallyMost bounds the actors that are told apart.
const tallyMost = 64

// tally counts the events that may come in floods in memory, where no disk can hold up who tells them. Of a type
// and actor the first is due at once, what comes within a minute after that as one, with its count.
type tally struct {
	mu     sync.Mutex // never held across a call to the disk
	counts map[tallyKey]*counted
	ending bool          // what is counted is due now
	woken  chan struct{} // one token: there is something to write
}

type tallyKey struct{ typ, actor string }

type counted struct {
	last event
	n    int64     // not written yet
	told time.Time // when some were last written
}

func newTally() tally { return tally{counts: map[tallyKey]*counted{}, woken: make(chan struct{}, 1)} }

// of is the count that an event belongs to. Beyond the most there is one of the rest. The caller holds mu.
func (t *tally) of(e event) *counted {
	k := tallyKey{e.Type, e.Actor}
	if t.counts[k] == nil && len(t.counts) >= tallyMost {
		for old, c := range t.counts {
			if c.n == 0 && time.Since(c.told) >= tallyPause {
				delete(t.counts, old)
			}
		}
		if len(t.counts) >= tallyMost {
			k.actor = "others"
		}
	}
	if t.counts[k] == nil {
		t.counts[k] = &counted{}
	}
	c := t.counts[k]
	e.Actor = k.actor
	c.n, c.last = c.n+1, e
	return c
}

// add counts an event that is to be written when it is due.
func (t *tally) add(e event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.of(e); c.n == 1 {
		t.wake()
	}
}

// wake lets run see what is counted now.
func (t *tally) wake() {
	select {
	case t.woken <- struct{}{}:
	default:
	}
}

// take counts what a commit makes known, and returns what is due to be written with it. settle is told
// once what became of the commit: what was not written stays counted, and what the commit itself was to
// make known did not happen if it failed.
func (t *tally) take(known []event) (due []event, settle func(done bool)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var made []*counted
	for _, e := range known {
		made = append(made, t.of(e))
	}
	now := time.Now()
	taken := map[*counted]int64{}
	for _, c := range t.counts {
		if c.n == 0 || now.Sub(c.told) < tallyPause && !t.ending {
			continue
		}
		e := c.last
		if c.n > 1 {
			e.Count = c.n
		}
		taken[c] = c.n
		due = append(due, e)
	}
	slices.SortFunc(due, func(a, b event) int { return cmp.Or(cmp.Compare(a.Type, b.Type), cmp.Compare(a.Actor, b.Actor)) })
	return due, func(done bool) {
		t.mu.Lock()
		defer t.mu.Unlock()
		if !done {
			for _, c := range made {
				c.n--
			}
			return
		}
		for c, n := range taken {
			c.n, c.told = c.n-n, now
		}
		if slices.ContainsFunc(made, func(c *counted) bool { return c.n > 0 }) {
			t.wake()
		}
	}
}

// next is the time until something is due; false if nothing is counted.
func (t *tally) next() (left time.Duration, some bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.counts {
		if c.n > 0 {
			if d := tallyPause - time.Since(c.told); !some || d < left {
				left, some = d, true
			}
		}
	}
	return left, some
}

// end writes all that is still counted, for Toad is about to end.
func (t *tally) end(write func() error) error {
	t.mu.Lock()
	t.ending = true
	t.mu.Unlock()
	if _, some := t.next(); !some {
		return nil
	}
	return write()
}

// run writes what is due until ctx ends. A write that fails, and be it that the disk is full, is tried
// again a little later; until then it is counted on.
func (t *tally) run(ctx context.Context, write func() error) {
	var again time.Time
	for ctx.Err() == nil {
		left, some := t.next()
		left = max(left, time.Until(again))
		if some && left <= 0 {
			if write() != nil {
				again = time.Now().Add(5 * time.Second)
			}
			continue
		}
		var due <-chan time.Time
		if some {
			due = time.After(left)
		}
		select {
		case <-t.woken:
		case <-due:
		case <-ctx.Done():
		}
	}
}

// appendDurably cuts the file at size, appends and syncs.
func appendDurably(path string, size int64, lines []byte) error {
	if err := boundary("append", path); err != nil {
		return storageError("appending to", path, err)
	}
	_, statErr := os.Lstat(path)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return storageError("appending to", path, err)
	}
	defer f.Close()
	if st, serr := f.Stat(); serr == nil && st.Size() < size { // what was known to be durable is gone
		return fmt.Errorf("appending to %s: %w: %w: it has lost its end", path, errStorage, errCorrupt)
	}
	if err = f.Truncate(size); err == nil {
		if _, err = f.WriteAt(lines, size); err == nil {
			err = f.Sync()
		}
	}
	if err != nil {
		return storageError("appending to", path, err)
	}
	if statErr != nil {
		return syncDir(filepath.Dir(path))
	}
	return nil
}

// logLine is one line of an operation's log, operations/<id>.log.
type logLine struct {
	Seq   int64     `json:"seq"`
	At    time.Time `json:"at"`
	State state     `json:"state"`
	Code  string    `json:"code"`
	Text  string    `json:"text"`
}

// operationLog appends to the log of one operation. It is told to people and is no source of truth:
// a line that cannot be written is lost, and the rollout goes on.
type operationLog struct {
	operation string
	path      string
	writing   sync.Mutex // one line at a time

	mu    sync.Mutex // never held across a call to the disk
	lines []logLine  // of this process and read back at open: followers are served from memory
	grown chan struct{}
}

func (d *dataDir) openLog(service, id string) *operationLog {
	l := &operationLog{operation: id, path: d.serviceFile(service, "operations", id+".log"), grown: make(chan struct{})}
	l.lines, _ = readLog(l.path)
	return l
}

// readLog reads a log; a torn last line is passed over.
func readLog(path string) ([]logLine, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var lines []logLine
	for line := range bytes.Lines(b) {
		var l logLine
		if bytes.HasSuffix(line, []byte("\n")) && json.Unmarshal(line, &l) == nil {
			lines = append(lines, l)
		}
	}
	return lines, nil
}

// maxLogLines bounds a log: a candidate that flaps for hours must not fill the disk. The end of the
// operation is always written.
const maxLogLines = 2000

// say appends one line of the fixed vocabulary.
func (l *operationLog) say(now time.Time, st state, code string, args ...any) {
	format, ok := logTexts[code]
	if !ok {
		panic("no text for log code " + code)
	}
	l.writing.Lock()
	defer l.writing.Unlock()
	l.mu.Lock()
	line := logLine{Seq: int64(len(l.lines)) + 1, At: now.UTC().Truncate(time.Millisecond), State: st, Code: code, Text: fmt.Sprintf(format, args...)}
	full := len(l.lines) >= maxLogLines && !st.terminal()
	if !full {
		l.lines = append(l.lines, line)
		close(l.grown)
		l.grown = make(chan struct{})
	}
	l.mu.Unlock()
	if full {
		return
	}
	b, _ := json.Marshal(line)
	if makeDir(filepath.Dir(l.path)) != nil {
		return
	}
	f, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return
	}
	defer f.Close()
	if line.Seq > 1 { // after a torn line begin a new one
		var c [1]byte
		if st, err := f.Stat(); err == nil && st.Size() > 0 {
			if _, err := f.ReadAt(c[:], st.Size()-1); err == nil && c[0] != '\n' {
				b = append([]byte{'\n'}, b...)
			}
		}
	}
	_, _ = f.Write(append(b, '\n'))
}

// since returns the lines after seq and a channel that is closed when there are more.
func (l *operationLog) since(seq int64) ([]logLine, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if seq < 0 || seq > int64(len(l.lines)) {
		seq = int64(len(l.lines))
	}
	return l.lines[seq:len(l.lines):len(l.lines)], l.grown
}

// public is the public half of an error; what has none is told as not continued.
func public(err error) failure {
	var c *codedError
	switch {
	case errors.As(err, &c):
		return c.failure
	case errors.Is(err, errStorage), errors.Is(err, syscall.ENOSPC):
		return public(failed("state_unavailable", nil))
	}
	return public(failed("interrupted", nil, "the host did not do what was asked of it"))
}
