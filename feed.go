// feed.go serves what happened: the events of a service or of Toad itself, as pages, to waiting requests
// and as streams; whether a log of events is whole; what a candidate said itself. It also makes refusals
// events.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

type wireEvent struct {
	Cursor      int64    `json:"cursor"`
	ID          string   `json:"id"`
	At          wireTime `json:"at"`
	Type        string   `json:"type"`
	Service     string   `json:"service"` // "" of Toad's own
	OperationID string   `json:"operation_id"`
	Actor       string   `json:"actor"`
	Detail      string   `json:"detail"`
	Count       int64    `json:"count,omitempty"`
	Prev        string   `json:"prev"`
	Hash        string   `json:"hash"`
}

type wireEvents struct {
	Events     []wireEvent `json:"events"`
	NextCursor int64       `json:"next_cursor"` // pass as after= for more
}

func wireEventOf(e event) wireEvent {
	return wireEvent{Cursor: e.Cursor, ID: e.ID, At: wireTime(e.At), Type: e.Type, Service: e.Service, OperationID: e.Operation,
		Actor: e.Actor, Detail: e.Detail, Count: e.Count, Prev: e.Prev, Hash: e.Hash}
}

const (
	eventsPage    = 500              // the most events of one answer
	streamPage    = 100              // and of one write to a stream
	heartbeat     = 15 * time.Second // a stream is never silent for longer, so that proxies keep it
	writePatience = 30 * time.Second // who does not take what is written within that is let go
)

// patient lets a request wait for its answer longer than it may take to arrive: the server reads on to see
// the client go, and the deadline for the request would be taken for that.
func patient(w http.ResponseWriter) { _ = http.NewResponseController(w).SetReadDeadline(time.Time{}) }

// stream is an answer whose writes are sent at once, each taken by the client in time or failed.
type stream struct {
	w  http.ResponseWriter
	rc *http.ResponseController
}

func newStream(w http.ResponseWriter) stream {
	patient(w)
	return stream{w, http.NewResponseController(w)}
}

func (s stream) Write(b []byte) (int, error) {
	_ = s.rc.SetWriteDeadline(time.Now().Add(writePatience))
	n, err := s.w.Write(b)
	if err == nil {
		err = s.rc.Flush()
	}
	return n, err
}

// eventsOf is the log of a service, or Toad's own for "".
func (d *daemon) eventsOf(s *service) (*eventLog, error) {
	if s == nil {
		l, err := d.data.own.open()
		if err != nil {
			e := refuse("state_unavailable", "toad's own events cannot be read now")
			e.err = err
			return nil, e
		}
		return l, nil
	}
	if err := s.usable(); err != nil {
		return nil, err
	}
	return s.ev.Load(), nil
}

// getEvents answers with the events after a cursor, at most a page of them. With none it waits as long as
// it was asked to; as a stream it goes on until the client goes.
func (d *daemon) getEvents(w http.ResponseWriter, r *http.Request) error {
	wait, err := waitOf(r)
	if err != nil {
		return err
	}
	streamed := strings.Contains(r.Header.Get("Accept"), "text/event-stream")
	from, field := r.FormValue("after"), "after"
	if id := r.Header.Get("Last-Event-ID"); streamed && id != "" { // who comes back repeats the address it began with
		from, field = id, "Last-Event-ID"
	}
	after := int64(0)
	if from != "" {
		if after, err = strconv.ParseInt(from, 10, 64); err != nil || after < 0 {
			return invalid(field, "%s must be the cursor of an event, or 0", field)
		}
	}
	name, who := r.FormValue("service"), callerOf(r)
	if !who.local() {
		if name != "" && name != who.service {
			return refuse("not_found", "there is no such service")
		}
		name = who.service
	}
	var s *service
	if name != "" {
		if s, err = d.service(name); err != nil {
			return err
		}
	}
	l, err := d.eventsOf(s)
	if err != nil {
		return err
	}
	if _, end, _, _ := l.since(after, 0); after > end {
		return invalid(field, "%s is %d, and the last event is %d: the log was begun anew, read it from the start", field, after, end)
	}
	if streamed {
		return d.streamEvents(w, r, s, after)
	}

	if wait > 0 {
		patient(w)
	}
	ctx, cancel := context.WithTimeout(r.Context(), wait)
	defer cancel()
	for {
		events, _, grown, err := l.since(after, eventsPage)
		if err != nil {
			return d.unreadable(err)
		}
		if len(events) > 0 || ctx.Err() != nil {
			page := wireEvents{Events: []wireEvent{}, NextCursor: after}
			for _, e := range events {
				page.Events, page.NextCursor = append(page.Events, wireEventOf(e)), e.Cursor
			}
			return writeJSON(w, http.StatusOK, page)
		}
		select {
		case <-grown:
			if l, err = d.eventsOf(s); err != nil {
				return err
			}
		case <-ctx.Done():
		case <-d.stopping:
			cancel()
		}
	}
}

func (d *daemon) unreadable(err error) error {
	e := refuse("state_unavailable", "the events cannot be read now")
	e.err = err
	return e
}

// streamEvents sends each event once it is durable (text/event-stream, its id the cursor), and ends when
// the client goes, takes nothing, or Toad ends; the client resumes after the last id it saw.
func (d *daemon) streamEvents(w http.ResponseWriter, r *http.Request, s *service, after int64) error {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Accel-Buffering", "no")
	out := newStream(w)
	if _, err := io.WriteString(out, ": events\n\n"); err != nil { // the client knows now that it is heard
		return nil
	}
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	for {
		l, err := d.eventsOf(s)
		var events []event
		var grown <-chan struct{}
		if err == nil {
			events, _, grown, err = l.since(after, streamPage)
		}
		if err != nil {
			d.log.Warn("streaming events", "err", err)
			return nil // who comes back is told
		}
		var buf bytes.Buffer
		for _, e := range events {
			b, err := json.Marshal(wireEventOf(e))
			if err != nil {
				return nil
			}
			fmt.Fprintf(&buf, "id: %d\ndata: %s\n\n", e.Cursor, b)
			after = e.Cursor
		}
		if buf.Len() == 0 {
			select {
			case <-grown:
				continue
			case <-beat.C:
				buf.WriteString(":\n\n")
			case <-r.Context().Done():
				return nil
			case <-d.stopping:
				return nil
			}
		}
		if _, err := out.Write(buf.Bytes()); err != nil || r.Context().Err() != nil {
			return nil
		}
		select {
		case <-d.stopping:
			return nil
		default:
		}
	}
}

// countRefusal makes an event of a call that was not let through, and of a refused one that would have
// changed something. It is counted in memory, so that no answer waits for a disk.
func (d *daemon) countRefusal(r *http.Request, p problem) {
	who := callerOf(r)
	e := event{Type: "refused", Actor: who.actor(), Operation: p.OperationID, Detail: p.Code}
	name := who.service
	switch {
	case p.Code == "unauthorized" || p.Code == "forbidden":
		e.Type = "denied"
		if who.local() { // nobody that is known
			e.Actor = "unknown"
		}
	case r.Method == http.MethodGet || r.Method == http.MethodHead:
		return
	case who.local():
		name = r.PathValue("service")
	}
	if r.Pattern != "" {
		e.Detail = r.Pattern + ": " + p.Code
	}
	d.mu.Lock()
	s := d.services[name]
	d.mu.Unlock()
	if s != nil {
		s.tally.add(e)
	} else {
		d.data.own.tally.add(e)
	}
}

// getOutput gives what the candidate wrote to its standard output and error, as it was. It may be anything:
// it is the operator's alone.
func (d *daemon) getOutput(w http.ResponseWriter, r *http.Request) error {
	if !callerOf(r).local() {
		return refuse("not_found", "there is no such route")
	}
	s, op, err := d.findOperation(r.PathValue("id"))
	if err != nil {
		return err
	}
	b, err := os.ReadFile(s.outputPath(op.ID))
	if errors.Is(err, fs.ErrNotExist) {
		return refuse("not_found", "no output of this operation is kept: only of a candidate that was stopped to be rolled back")
	} else if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = newStream(w).Write(b)
	return nil
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

// audit follows the chain of a service's events to the head that its record names, or of Toad's own for "".
// lock keeps record and log in step while both are looked at; the lines are read after it, up to where the
// log then ended, so that a long one holds up nobody.
func (d *dataDir) audit(service string, lock func(service string) (unlock func())) wireChain {
	path := filepath.Join(d.path, "events.jsonl")
	if service != "" {
		path = d.serviceFile(service, "events.jsonl")
	}
	unlock := lock(service)
	r := &record{}
	var err error
	if service != "" {
		err = readRecord(d.serviceFile(service, "service.json"), r)
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
	switch end := r.eventEnd(); {
	case errors.As(verr, &bad):
		c.Line, c.Problem = bad.line, bad.Error()
	case verr != nil:
		c.Problem = verr.Error()
	case service == "" || head == end && (err == nil || errors.Is(err, fs.ErrNotExist)):
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		c.Problem = "every line follows, but which is the last cannot be told: service.json cannot be read"
	default:
		bad = endsElsewhere(head, end, "service.json")
		c.Line, c.Problem = bad.line, bad.Error()
	}
	return c
}

// getAudit verifies the log of one service, or all of them and Toad's own.
func (d *daemon) getAudit(w http.ResponseWriter, r *http.Request) error {
	if !callerOf(r).local() {
		return refuse("not_found", "there is no such route")
	}
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
	own := int64(0) // what was written before the lines are read must be there
	if l, err := d.data.own.open(); err == nil {
		_, own, _, _ = l.since(0, 0)
	}
	c := d.data.audit("", func(string) func() {
		d.data.own.mu.Lock()
		return d.data.own.mu.Unlock
	})
	if c.Problem == "" && c.Events < own {
		bad := endsElsewhere(eventHead{Cursor: c.Events}, eventHead{Cursor: own}, "the running Toad")
		c.Line, c.Problem = bad.line, bad.Error()
	}
	add(c)
	for _, s := range d.all() {
		add(d.data.audit(s.name, d.lockService))
	}
	return writeJSON(w, http.StatusOK, a)
}
