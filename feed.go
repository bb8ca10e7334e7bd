// feed.go serves what happened: the events of a service or of Toad itself, as pages, to waiting requests
// and as streams, and what a candidate said itself. It also makes refusals events.
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
	eventsPage = 500              // the most events of one answer
	streamPage = 100              // and of one write to a stream
	heartbeat  = 15 * time.Second // a stream is never silent for longer, so that proxies keep it
)

// stream is an answer whose writes are sent at once, each taken by the client in time (see reply) or failed.
type stream struct {
	w  http.ResponseWriter
	rc *http.ResponseController
}

func newStream(w http.ResponseWriter) stream { return stream{w, http.NewResponseController(w)} }

func (s stream) Write(b []byte) (int, error) {
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
			return nil, refuse("state_unavailable", "toad's own events cannot be read now").because(err)
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
	if !who.local() && name == "" {
		name = who.service
	}
	var s *service
	if name != "" {
		if s, err = d.serviceOf(who, name); err != nil {
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

	ctx, cancel := context.WithTimeout(r.Context(), wait)
	defer cancel()
	for {
		events, _, grown, err := l.since(after, eventsPage)
		if err != nil {
			return refuse("state_unavailable", "the events cannot be read now").because(err)
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

// streamEvents sends each event once it is durable (text/event-stream, its id the cursor), and ends when
// the client goes, takes nothing, or Toad ends; the client resumes after the last id it saw.
func (d *daemon) streamEvents(w http.ResponseWriter, r *http.Request, s *service, after int64) error {
	setType(w, "text/event-stream")
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
	case r.Method == http.MethodGet || r.Method == http.MethodHead:
		return
	case who.local():
		name = r.PathValue("service")
	}
	if r.Pattern != "" {
		e.Detail = r.Pattern + ": " + p.Code
	}
	if s := d.known(name); s != nil {
		s.tally.add(e)
	} else {
		d.data.own.tally.add(e)
	}
}

// getOutput gives what the candidate wrote to its standard output and error, as it was. It may be anything:
// it is the operator's alone.
func (d *daemon) getOutput(w http.ResponseWriter, r *http.Request) error {
	s, op, err := d.findOperation(callerOf(r), r.PathValue("id"))
	if err != nil {
		return err
	}
	b, err := os.ReadFile(s.outputPath(op.ID))
	if errors.Is(err, fs.ErrNotExist) {
		return refuse("not_found", "no output of this operation is kept: only of a candidate that was stopped to be rolled back")
	} else if err != nil {
		return err
	}
	setType(w, "application/octet-stream")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = newStream(w).Write(b)
	return nil
}
