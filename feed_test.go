package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// pipes is a network inside a bubble: a listener, and a dialer for it.
type pipes struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.once.Do(func() { close(p.done) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

func (p *pipes) dial(context.Context, string, string) (net.Conn, error) {
	here, there := net.Pipe()
	select {
	case p.conns <- there:
		return here, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

// listen serves the world as serve does, over pipes, and returns a client of it.
func (w *apiWorld) listen() (c *http.Client, stop func()) {
	p := newPipes()
	srv := newServer(w.handler, w.d.log)
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(p) }()
	tr := &http.Transport{DialContext: p.dial}
	return &http.Client{Transport: tr}, func() {
		tr.CloseIdleConnections()
		srv.Close()
		p.Close()
		<-served
	}
}

// deny has every request refused before its route is looked for; with "" none.
func (w *apiWorld) deny(code string, status int) {
	if w.denied = nil; code != "" {
		w.denied = refuse(code, "no")
		w.denied.Status = status
		if code == "forbidden" {
			w.denied.Verb = "read"
		}
	}
}

// chained tells whether a log is whole.
func (w *apiWorld) chained(service string) bool {
	return w.d.data.audit(service, noLock).Problem == ""
}

// again replaces the daemon by a new one on the same directory, as a restart of Toad does.
func (w *apiWorld) again() {
	w.end()
	w.begin()
}

func (w *apiWorld) events(query string) wireEvents {
	w.t.Helper()
	a := w.do("GET", "/v1/events"+query, "")
	var page wireEvents
	if err := json.Unmarshal([]byte(a.body), &page); err != nil || a.status != 200 {
		w.t.Fatalf("events%s: status %d: %s", query, a.status, a.body)
	}
	return page
}

func typesOf(events []wireEvent) (types []string) {
	for _, e := range events {
		types = append(types, e.Type)
	}
	return types
}

// told reads server-sent events: the ids, and the events.
type told struct {
	body io.ReadCloser
	r    *bufio.Reader
}

func (w *apiWorld) stream(c *http.Client, query, lastID string) *told {
	w.t.Helper()
	req, err := http.NewRequest("GET", "http://toad/v1/events"+query, nil)
	must(w.t, err)
	req.Header.Set("Accept", "text/event-stream")
	if lastID != "" {
		req.Header.Set("Last-Event-ID", lastID)
	}
	resp, err := c.Do(req)
	must(w.t, err)
	if ct := resp.Header.Get("Content-Type"); resp.StatusCode != 200 || ct != "text/event-stream" {
		w.t.Fatalf("status %d, Content-Type %q", resp.StatusCode, ct)
	}
	return &told{resp.Body, bufio.NewReader(resp.Body)}
}

// next is the next event, or the error that ended the stream. Comments are passed over.
func (s *told) next() (id string, e wireEvent, err error) {
	for {
		line, err := s.r.ReadString('\n')
		if err != nil {
			return "", e, err
		}
		line = strings.TrimSuffix(line, "\n")
		switch field, value, _ := strings.Cut(line, ": "); {
		case field == "id":
			id = value
		case field == "data":
			if err := json.Unmarshal([]byte(value), &e); err != nil {
				return id, e, err
			}
		case line == "" && id != "":
			return id, e, nil
		}
	}
}

func TestEventsByCursor(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		if p := w.events("?service=hello"); len(p.Events) != 0 || p.NextCursor != 0 {
			t.Errorf("a service to which nothing happened: %+v", p)
		}
		w.await(w.deploy("hello", w.push("hello", "1", app{}), 0, "k1").ID, "promoted")
		w.await(w.deploy("other", w.push("other", "1", app{}), 0, "k1").ID, "promoted")
		all := w.events("?service=hello")
		if got := typesOf(all.Events); !slices.Equal(got, []string{"deploy", "activate", "promote"}) || all.NextCursor != 3 {
			t.Fatalf("events %v, next %d", got, all.NextCursor)
		}
		if e := all.Events[0]; e.Cursor != 1 || e.Actor != "local" || e.Service != "hello" || e.OperationID == "" || e.Hash != all.Events[1].Prev {
			t.Errorf("%+v", e)
		}
		if p := w.events("?service=hello&after=2"); len(p.Events) != 1 || p.Events[0].Type != "promote" || p.NextCursor != 3 {
			t.Errorf("after 2: %+v", p)
		}
		if p := w.events("?service=hello&after=3"); len(p.Events) != 0 || p.NextCursor != 3 {
			t.Errorf("after the last: %+v", p)
		}
		must(t, w.d.data.ownEvent("start", "v1"))
		if p := w.events(""); len(p.Events) != 1 || p.Events[0].Type != "start" || p.Events[0].Service != "" {
			t.Errorf("toad's own: %+v", p)
		}
		for query, field := range map[string]string{"?service=hello&after=4": "after", "?after=-1": "after", "?after=x": "after", "?after=1.5": "after", "?wait=61": "wait", "?service=hello&limit=1": "limit"} {
			w.refused(query, w.do("GET", "/v1/events"+query, ""), 400, "invalid_request", field)
		}
		w.refused("Last-Event-ID", w.do("GET", "/v1/events", "", "Accept", "text/event-stream", "Last-Event-ID", "soon"), 400, "invalid_request", "Last-Event-ID")
		w.refused("unknown", w.do("GET", "/v1/events?service=nobody", ""), 404, "not_found", "")
	})
}

// A token reads its own service's events, and cannot tell another's from one that is not there.
func TestEventsOfATokensService(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		w.await(w.deploy("hello", w.push("hello", "1", app{}), 0, "k1").ID, "promoted")
		w.await(w.deploy("other", w.push("other", "1", app{}), 0, "k1").ID, "promoted")
		w.who = caller{remote: true, token: "abc", service: "hello", verbs: tokenVerbs}
		for _, query := range []string{"", "?service=hello"} {
			if p := w.events(query); len(p.Events) != 3 || p.Events[0].Service != "hello" {
				t.Errorf("%q: %+v", query, p)
			}
		}
		other, nobody := w.do("GET", "/v1/events?service=other", ""), w.do("GET", "/v1/events?service=nobody", "")
		w.refused("another's", other, 404, "not_found", "")
		if other.body != nobody.body {
			t.Errorf("another's service is told from none: %s, %s", other.body, nobody.body)
		}
		for _, path := range []string{"/v1/audit", "/v1/operations/" + noSuchID + "/output"} {
			w.refused(path, w.do("GET", path, ""), 404, "not_found", "")
		}
	})
}

func TestWaitingForEvents(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		begun := time.Now()
		if p := w.events("?service=hello&wait=10"); len(p.Events) != 0 || time.Since(begun) != 10*time.Second {
			t.Errorf("%d events after %s", len(p.Events), time.Since(begun))
		}
		got := make(chan wireEvents)
		go func() { got <- w.events("?service=hello&wait=60") }()
		time.Sleep(5 * time.Second)
		begun = time.Now()
		w.deploy("hello", w.push("hello", "1", app{}), 0, "k1")
		if p := <-got; len(p.Events) != 1 || p.Events[0].Type != "deploy" || time.Since(begun) > 0 {
			t.Errorf("%+v after %s", p, time.Since(begun))
		}
		go func() { got <- w.events("?service=other&wait=60") }()
		time.Sleep(time.Second)
		begun = time.Now()
		close(w.d.stopping)
		if p := <-got; len(p.Events) != 0 || time.Since(begun) > 0 {
			t.Errorf("toad stops: %+v after %s", p, time.Since(begun))
		}
		w.d.stopping = make(chan struct{})
	})
}

// A request that waits or streams outlives the time that a request may take to arrive.
func TestWaitingOutlastsTheReadTimeout(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		c, stop := w.listen()
		defer stop()
		begun := time.Now()
		resp, err := c.Get("http://toad/v1/events?service=hello&wait=60")
		must(t, err)
		resp.Body.Close()
		if d := time.Since(begun); d != time.Minute {
			t.Errorf("events were waited for for %s", d)
		}
		op := w.deploy("hello", w.push("hello", "1", app{readyAfter: -1}), 0, "k1")
		w.await(op.ID, "probation")
		begun = time.Now()
		resp, err = c.Get("http://toad/v1/operations/" + op.ID + "?wait=45&after_state=probation")
		must(t, err)
		resp.Body.Close()
		if d := time.Since(begun); d != 45*time.Second {
			t.Errorf("the operation was waited for for %s", d)
		}
		resp, err = c.Get("http://toad/v1/operations/" + op.ID + "/log?follow=true")
		must(t, err)
		b, err := io.ReadAll(resp.Body)
		must(t, err)
		if w.await(op.ID, "failed"); !strings.Contains(string(b), "no_rollback_target") {
			t.Errorf("the log was cut off: %s", b)
		}
	})
}

// TestStreamResumes: no event twice or lost over a lost connection, and over a restart of Toad.
func TestStreamResumes(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		c, stop := w.listen()
		s := w.stream(c, "?service=hello", "")
		op := w.deploy("hello", w.push("hello", "1", app{}), 0, "k1")
		var ids []string
		take := func(n int) {
			t.Helper()
			for range n {
				id, e, err := s.next()
				must(t, err)
				if id != strconv.FormatInt(e.Cursor, 10) {
					t.Errorf("id %s of cursor %d", id, e.Cursor)
				}
				ids = append(ids, id)
			}
		}
		take(2)
		s.body.Close()
		w.await(op.ID, "promoted")
		s = w.stream(c, "?service=hello&after=0", ids[len(ids)-1])
		take(1)

		close(w.d.stopping)
		if _, _, err := s.next(); !errors.Is(err, io.EOF) {
			t.Errorf("toad stops, and the stream: %v", err)
		}
		s.body.Close()
		stop()
		w.again()
		c, stop = w.listen()
		defer stop()
		w.await(w.deploy("hello", w.push("hello", "2", app{}), 1, "k2").ID, "promoted")
		s = w.stream(c, "?service=hello", ids[len(ids)-1])
		take(3)
		s.body.Close()
		if want := []string{"1", "2", "3", "4", "5", "6"}; !slices.Equal(ids, want) {
			t.Errorf("ids %v", ids)
		}
	})
}

// A stream is never silent for long, and a client that goes leaves nothing.
func TestStreamBeatsAndEndsWithItsClient(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		c, stop := w.listen()
		running := func() int {
			synctest.Wait()
			stacks := make([]byte, 1<<20)
			return strings.Count(string(stacks[:runtime.Stack(stacks, true)]), "streamEvents(")
		}
		var streams []*told
		for range 10 {
			streams = append(streams, w.stream(c, "?service=hello", ""))
		}
		r := streams[0].r
		if line, err := r.ReadString('\n'); err != nil || !strings.HasPrefix(line, ":") {
			t.Errorf("it begins with %q, %v", line, err)
		}
		_, _ = r.ReadString('\n')
		begun := time.Now()
		if line, err := r.ReadString('\n'); err != nil || line != ":\n" || time.Since(begun) > heartbeat {
			t.Errorf("a beat is %q, %v, after %s", line, err, time.Since(begun))
		}
		if n := running(); n != 10 {
			t.Errorf("%d streams run", n)
		}
		for _, s := range streams {
			s.body.Close()
		}
		if n := running(); n != 0 {
			t.Errorf("%d streams run on", n)
		}
		stop()
	})
}

// A followed log goes on when the records had to be read again, ends when Toad does, and is whole when the
// operation is archived.
func TestFollowedLog(t *testing.T) { // E11
	var breaks atomic.Int64
	testingOnlyBoundary = func(step, path string) error {
		if step == "write" && strings.HasSuffix(path, "/hello/service.json") && breaks.CompareAndSwap(1, 2) {
			return errors.New("input/output error")
		}
		return nil
	}
	defer func() { testingOnlyBoundary = nil }()
	inAPI(t, func(t *testing.T, w *apiWorld) {
		c, stop := w.listen()
		w.await(w.deploy("hello", w.push("hello", "1", app{}), 0, "k1").ID, "promoted")
		op := w.deploy("hello", w.push("hello", "2", app{readyAfter: 10 * time.Second}), 1, "k2")
		w.await(op.ID, "probation")
		follow := func() <-chan string {
			resp, err := c.Get("http://toad/v1/operations/" + op.ID + "/log?follow=true")
			must(t, err)
			text := make(chan string, 1)
			go func() {
				b, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				text <- string(b)
			}()
			return text
		}
		text := follow()
		breaks.Store(1)
		w.await(op.ID, "promoted")
		if said := <-text; breaks.Load() != 2 || !strings.Contains(said, `"resumed"`) || !strings.Contains(said, `"promoted"`) || !strings.Contains(said, `"installed"`) {
			t.Errorf("broken %d: %s", breaks.Load(), said)
		}

		op = w.deploy("hello", w.push("hello", "3", app{readyAfter: 10 * time.Second}), 2, "k3")
		text = follow()
		time.Sleep(5 * time.Second)
		begun := time.Now()
		close(w.d.stopping)
		if said := <-text; time.Since(begun) > 0 || !strings.Contains(said, `"accepted"`) {
			t.Errorf("toad stops: after %s %s", time.Since(begun), said)
		}
		stop()
		w.again()
		c, stop = w.listen()
		defer stop()
		text = follow()
		w.await(op.ID, "promoted")
		if said := <-text; !strings.Contains(said, `"accepted"`) || !strings.Contains(said, `"resumed"`) || !strings.Contains(said, `"promoted"`) {
			t.Errorf("after a restart: %s", said)
		}
		w.await(w.deploy("hello", w.push("hello", "4", app{}), 3, "k4").ID, "promoted")
		if said := <-follow(); !strings.Contains(said, `"accepted"`) || !strings.Contains(said, `"promoted"`) {
			t.Errorf("archived: %s", said)
		}
	})
}

// A client that takes nothing is let go, and meanwhile holds up nobody.
func TestSlowClientIsLetGo(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		p := newPipes()
		srv := newServer(w.handler, w.d.log)
		served := make(chan struct{})
		go func() { defer close(served); _ = srv.Serve(p) }()
		defer func() { srv.Close(); p.Close(); <-served }()
		op := w.deploy("hello", w.push("hello", "1", app{}), 0, "k1")
		for _, path := range []string{"/v1/events?service=hello", "/v1/operations/" + op.ID + "/log?follow=true"} {
			conn, err := p.dial(context.Background(), "", "")
			must(t, err)
			_, err = io.WriteString(conn, "GET "+path+" HTTP/1.1\r\nHost: toad\r\nAccept: text/event-stream\r\n\r\n")
			must(t, err)
			time.Sleep(time.Second) // the answer is being written, and nobody reads
			begun := time.Now()
			if a := w.do("GET", "/v1/services/hello", ""); a.status != 200 || time.Since(begun) > 0 {
				t.Errorf("%s: a read beside it: status %d after %s", path, a.status, time.Since(begun))
			}
			time.Sleep(writeTime)
			if b, err := io.ReadAll(conn); err != nil || len(b) > 0 {
				t.Errorf("%s: after %s it still writes: %q, %v", path, writeTime, b, err)
			}
			conn.Close()
		}
		w.await(op.ID, "promoted")
	})
}

// eventsOf are the service's events of a type.
func (w *world) eventsOf(typ string) (events []event) {
	synctest.Wait()
	l := w.s.ev.Load()
	all, _, _, err := l.since(0, int(l.head.Cursor))
	must(w.t, err)
	return slices.DeleteFunc(slices.Clone(all), func(e event) bool { return e.Type != typ })
}

// writeEvents makes a log of n events, in one write.
func writeEvents(t testing.TB, path string, n int) *eventLog {
	l, err := readEnd(path)
	must(t, err)
	var events []event
	head := l.head
	for i := range n {
		e := event{At: time.Unix(int64(i), 0).UTC(), Type: "restart", Service: "hello", Actor: "toad", Detail: strings.Repeat("x", i%700)}
		head = e.seal(head)
		events = append(events, e)
	}
	must(t, l.append(events))
	l, err = readEnd(path) // nothing of it in memory
	must(t, err)
	return l
}

// countingReader counts what is read of a file.
type countingReader struct {
	f *os.File
	n int
}

func (c *countingReader) ReadAt(b []byte, at int64) (int, error) {
	n, err := c.f.ReadAt(b, at)
	c.n += n
	return n, err
}

func TestEventsOfALongLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events.jsonl")
	const n = 20_000
	l := writeEvents(t, path, n)
	for _, after := range []int64{0, 1, 63, 64, 5000, n / 2, n - 65, n - 2, n - 1, n} {
		events, end, _, err := l.since(after, 100)
		must(t, err)
		if want := min(100, n-after); int64(len(events)) != want || end != n {
			t.Errorf("after %d: %d events of %d, end %d", after, len(events), want, end)
		}
		for i, e := range events {
			if e.Cursor != after+1+int64(i) {
				t.Fatalf("after %d: event %d has cursor %d", after, i, e.Cursor)
			}
		}
		f, err := os.Open(path)
		must(t, err)
		c := &countingReader{f: f}
		at, err := seekEvent(c, l.size, after)
		must(t, err)
		if f.Close(); c.n > 1<<18 || at > l.size {
			t.Errorf("after %d: found at %d of %d by reading %d bytes", after, at, l.size, c.n)
		}
	}
	e := event{Type: "healthy", Actor: "toad"}
	e.seal(l.head)
	must(t, l.append([]event{e}))
	if events, _, _, err := l.since(n-10, 100); err != nil || len(events) != 11 {
		t.Errorf("from the disk and beyond: %d events, %v", len(events), err)
	}
	must(t, os.Remove(path))
	if events, _, _, err := l.since(n, 100); err != nil || len(events) != 1 {
		t.Errorf("the last is in memory: %d events, %v", len(events), err)
	}
}

func TestRefusalsAreEvents(t *testing.T) {
	var saves atomic.Int64
	testingOnlyBoundary = func(step, path string) error {
		if step == "replace" && strings.HasSuffix(path, "/hello/service.json") {
			saves.Add(1)
		}
		return nil
	}
	defer func() { testingOnlyBoundary = nil }()
	inAPI(t, func(t *testing.T, w *apiWorld) {
		image := w.push("hello", "1", app{})
		op := w.deploy("hello", image, 0, "k1")
		w.await(op.ID, "promoted")
		before := w.events("?service=hello").NextCursor
		since := func() []wireEvent { return w.events(fmt.Sprintf("?service=hello&after=%d", before)).Events }

		w.do("GET", "/v1/operations/"+noSuchID, "")
		w.do("POST", "/v1/deployments", deployBody("hello", image, 0, "k1")) // the same request again
		synctest.Wait()
		if got := since(); len(got) != 0 {
			t.Errorf("a read and a repeated request made %+v", got)
		}

		saved := saves.Load()
		for i := range 1000 {
			w.do("POST", "/v1/deployments", deployBody("hello", image, 7, fmt.Sprint("s", i)))
			time.Sleep(50 * time.Millisecond)
		}
		got := since()
		if len(got) != 1 || got[0].Type != "refused" || got[0].Actor != "local" || got[0].Count != 0 || got[0].Detail != "POST /v1/deployments: stale_generation" {
			t.Errorf("a flood made %+v", got)
		}
		if n := saves.Load() - saved; n != 1 {
			t.Errorf("a flood of 50 s made %d commits", n)
		}
		w.do("POST", "/v1/operations/"+op.ID+"/rollback", "")
		time.Sleep(time.Minute)
		if got = since(); len(got) != 2 || got[1].Count != 1000 || got[1].Detail != "POST /v1/operations/{id}/rollback: not_rollbackable" || got[1].OperationID != op.ID {
			t.Errorf("the rest is %+v", got)
		}
		if d := time.Time(got[1].At).Sub(time.Time(got[0].At)); d < time.Minute {
			t.Errorf("the rest came after %s", d)
		}
		time.Sleep(time.Hour)
		if got = since(); len(got) != 2 {
			t.Errorf("later %+v", got)
		}

		// What is of no service is Toad's own.
		w.do("POST", "/v1/deployments", deployBody("nobody", image, 0, "k1"))
		synctest.Wait()
		w.do("DELETE", "/v1/services", "")
		time.Sleep(time.Minute + time.Second)
		if own := w.events("").Events; len(own) != 2 || own[0].Type != "refused" || own[0].Detail != "POST /v1/deployments: not_found" {
			t.Errorf("toad's own: %+v", own)
		}
		if !w.chained("hello") || !w.chained("") {
			t.Error("the chains do not hold")
		}
	})
}

// What a token is refused is an event of its own service, whatever it asked for.
func TestDenialsAreEvents(t *testing.T) { // E10
	inAPI(t, func(t *testing.T, w *apiWorld) {
		image := w.push("other", "1", app{})
		w.who = caller{remote: true, token: "abc", service: "hello", verbs: tokenVerbs}
		w.do("POST", "/v1/deployments", deployBody("other", image, 7, "k"))
		synctest.Wait()
		w.deny("forbidden", 403)
		w.do("GET", "/v1/services/hello", "")
		w.who = caller{remote: true}
		w.deny("unauthorized", 401)
		w.do("GET", "/v1/services", "")
		synctest.Wait()
		w.do("POST", "/v1/deployments", "")
		w.deny("", 0)
		synctest.Wait()
		w.who = caller{}
		got := w.events("?service=hello").Events
		if len(got) != 2 {
			t.Fatalf("%+v", got)
		}
		for i, want := range []wireEvent{{Type: "refused", Detail: "POST /v1/deployments: "}, {Type: "denied", Detail: "forbidden"}} {
			if e := got[i]; e.Type != want.Type || e.Actor != "token:abc" || !strings.HasPrefix(e.Detail, want.Detail) {
				t.Errorf("%+v", e)
			}
		}
		if p := w.events("?service=other"); len(p.Events) != 0 {
			t.Errorf("the other service tells of it: %+v", p)
		}
		time.Sleep(time.Minute + time.Second)
		own := w.events("").Events
		if len(own) != 2 || own[0].Type != "denied" || own[0].Actor != "unknown" || own[0].Detail != "unauthorized" || own[1].Actor != "unknown" {
			t.Errorf("toad's own: %+v", own)
		}
	})
}

func TestRefusalsAreCountedWhileTheDiskIsFull(t *testing.T) { // E8
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		time.Sleep(time.Second)
		e := event{Type: "refused", Actor: "local", Detail: "x"}
		var full atomic.Bool
		full.Store(true)
		w.set(func() {
			w.spoil = func(step, path string) error {
				if full.Load() {
					return syscall.ENOSPC
				}
				return nil
			}
		})
		must(t, os.Remove(filepath.Join(w.dir, "reserve")))
		for range 10 {
			w.s.tally.add(e)
			time.Sleep(time.Minute)
		}
		if err := w.s.usable(); err != nil {
			t.Errorf("the service is closed for it: %v", err)
		}
		full.Store(false)
		time.Sleep(10 * time.Second)
		if got := w.eventsOf("refused"); len(got) != 1 || got[0].Count != 10 {
			t.Errorf("%+v", got)
		}
		w.chain()
	})
}

// Whatever commit of the counted events is cut short, none is told twice, and none that Toad survived is lost.
func TestCountedEventsAtEveryBoundary(t *testing.T) {
	var names []string
	counts := func(w *world) {
		w.s.tally.add(event{Type: "refused", Actor: "local", Detail: "x"})
		time.Sleep(time.Second)
		w.s.tally.add(event{Type: "refused", Actor: "local", Detail: "y"})
		w.s.tally.add(event{Type: "refused", Actor: "local", Detail: "z"})
		time.Sleep(2 * time.Minute)
	}
	run := func(do func(w *world)) {
		f := explore(t, func(w *world) {
			w.promote("v1")
			time.Sleep(time.Second)
			do(w)
		})
		if len(f.list) > 0 {
			t.Errorf("%s", strings.Join(f.list, "\n"))
		}
	}
	run(func(w *world) {
		w.arm(0, "", nil)
		w.set(func() { w.seen = func(name string) { names = append(names, name) } })
		counts(w)
		w.disarm()
		if got := w.eventsOf("refused"); len(got) != 2 || got[1].Count != 2 {
			w.t.Errorf("%+v", got)
		}
	})
	if len(names) < 8 {
		t.Fatalf("boundaries: %q", names)
	}
	for i, name := range names {
		for _, variant := range []string{notApplied, notHeard, errorApplied} {
			run(func(w *world) {
				w.arm(i+1, variant, nil)
				counts(w)
				lived := w.alive() == nil
				w.disarm()
				w.raise()
				time.Sleep(3 * time.Minute)
				var n int64
				for _, e := range w.eventsOf("refused") {
					n += max(e.Count, 1)
				}
				if n > 3 || lived && n != 3 {
					w.t.Errorf("%s at %s: %d of 3 are told (lived: %v)", variant, name, n, lived)
				}
				w.chain()
			})
		}
	}
}

// What commits count is told when it is due, and not with whatever is committed next.
func TestCountedRestartsAreToldInTime(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		time.Sleep(time.Minute)
		for _, v := range []string{"v2", "v3"} {
			w.expect(w.await(w.submit(w.push(v, app{exitAfter: time.Second})).ID), rolledBack, "restart_budget")
		}
		time.Sleep(10 * time.Minute)
		got := w.eventsOf("restart")
		if len(got) < 2 || got[len(got)-1].At.Sub(got[0].At) > tallyPause+5*time.Second {
			t.Errorf("%+v", got)
		}
		n := int64(0)
		for _, e := range got {
			n += max(e.Count, 1)
		}
		if n < 4 {
			t.Errorf("%d restarts are told", n)
		}
	})
}

func TestTallyBoundsItsActors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		y := newTally()
		for i := range 10 * tallyMost {
			y.add(event{Type: "denied", Actor: fmt.Sprint("token:", i)})
		}
		due, settle := y.take(nil)
		settle(true)
		var n int64
		for _, e := range due {
			n += max(e.Count, 1)
		}
		if len(due) != tallyMost+1 || n != 10*tallyMost {
			t.Errorf("%d events for %d", len(due), n)
		}
		if due, _ := y.take(nil); len(due) != 0 {
			t.Errorf("and again %+v", due)
		}
		time.Sleep(tallyPause)
		y.add(event{Type: "denied", Actor: "token:new"})
		if due, settle = y.take(nil); len(due) != 1 || due[0].Actor != "token:new" {
			t.Errorf("a minute later %+v", due)
		}
		settle(false)
		if due, _ = y.take([]event{{Type: "denied", Actor: "token:new"}}); len(due) != 1 || due[0].Count != 2 {
			t.Errorf("after a failure %+v", due)
		}
	})
}

func TestAuditFindsEachKindOfDamage(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		w.await(w.deploy("hello", w.push("hello", "1", app{}), 0, "k1").ID, "promoted")
		w.await(w.deploy("hello", w.push("hello", "2", app{}), 1, "k2").ID, "promoted")
		for range 4 {
			must(t, w.d.data.ownEvent("start", "v1"))
		}
		time.Sleep(time.Minute)
		verify := func(query string) wireAudit {
			t.Helper()
			var a wireAudit
			ans := w.do("GET", "/v1/audit"+query, "")
			must(t, json.Unmarshal([]byte(ans.body), &a))
			return a
		}
		if a := verify(""); !a.OK || len(a.Logs) != 4 || a.Logs[0].Events != 4 || a.Logs[2].Service != "hello" || a.Logs[2].Events != 6 {
			t.Errorf("whole logs: %+v", a)
		}
		lines := func(f func(l []string) []string) func(b string) string {
			return func(b string) string { return strings.Join(f(slices.Collect(strings.Lines(b))), "") }
		}
		reseal := func(b string, cursor int64, change func(e *event)) string { // as one who knows how
			return lines(func(l []string) []string {
				var head eventHead
				for i := range l {
					var e event
					must(t, json.Unmarshal([]byte(l[i]), &e))
					if e.Cursor == cursor {
						change(&e)
					}
					head = e.seal(head)
					line, _ := json.Marshal(e)
					l[i] = string(line) + "\n"
				}
				return l
			})(b)
		}
		for name, tt := range map[string]struct {
			damage func(b string) string
			line   int64
			says   string
			own    int64 // the line in Toad's own log
		}{
			"a line changed": {func(b string) string { return strings.Replace(b, `"cursor":3,`, `"cursor":3,"x":1,`, 1) }, 3, "was changed", 3},
			"a detail changed": {lines(func(l []string) []string {
				l[1] = strings.Replace(l[1], `"actor":"toad"`, `"actor":"t0ad"`, 1)
				return l
			}), 2, "was changed", 2},
			"white space":            {lines(func(l []string) []string { l[1] = " " + l[1]; return l }), 2, "was changed", 2},
			"a line removed":         {lines(func(l []string) []string { return slices.Delete(l, 2, 3) }), 3, "has cursor 4", 3},
			"the first removed":      {lines(func(l []string) []string { return l[1:] }), 1, "has cursor 2", 1},
			"two lines swapped":      {lines(func(l []string) []string { l[1], l[2] = l[2], l[1]; return l }), 2, "has cursor 3", 2},
			"a line twice":           {lines(func(l []string) []string { return slices.Insert(l, 2, l[1]) }), 3, "has cursor 2", 3},
			"the last removed":       {lines(func(l []string) []string { return l[:len(l)-1] }), 6, "is missing", 4},
			"the end removed":        {lines(func(l []string) []string { return l[:2] }), 3, "is missing", 3},
			"all removed":            {func(string) string { return "" }, 1, "is missing", 1},
			"a torn line":            {func(b string) string { return b[:len(b)-5] }, 6, "is torn", 4},
			"no event":               {lines(func(l []string) []string { l[3] = "hello\n"; return l }), 4, "is no event", 4},
			"all of it written anew": {func(b string) string { return reseal(b, 2, func(e *event) { e.Actor = "nobody" }) }, 6, "was replaced", 4},
			"one written anew": {func(b string) string {
				l := slices.Collect(strings.Lines(b))
				n := slices.Collect(strings.Lines(reseal(b, 2, func(e *event) { e.Actor = "nobody" })))
				l[1] = n[1]
				return strings.Join(l, "")
			}, 3, "does not follow", 3},
			"a line more, rightly on": {func(b string) string {
				var e event
				l := slices.Collect(strings.Lines(b))
				must(t, json.Unmarshal([]byte(l[len(l)-1]), &e))
				n := event{Type: "deploy"}
				n.seal(eventHead{e.Cursor, e.Hash})
				x, _ := json.Marshal(n)
				return b + string(x) + "\n"
			}, 7, "one too many", 5},
		} {
			for service, want := range map[string]int64{"hello": tt.line, "": tt.own} {
				path, query := filepath.Join(w.dir, "events.jsonl"), ""
				if service != "" {
					path, query = w.d.data.serviceFile(service, "events.jsonl"), "?service="+service
				}
				whole, err := os.ReadFile(path)
				must(t, err)
				must(t, os.WriteFile(path, []byte(tt.damage(string(whole))), 0o600))
				a := verify(query)
				c := a.Logs[0]
				if a.OK || c.Service != service || c.Line != want || !strings.Contains(c.Problem, tt.says) {
					t.Errorf("%s, service %q: %+v", name, service, a)
				}
				must(t, os.WriteFile(path, whole, 0o600))
			}
		}
		if a := verify(""); !a.OK {
			t.Errorf("put back: %+v", a)
		}
		w.refused("unknown service", w.do("GET", "/v1/audit?service=nobody", ""), 404, "not_found", "")
	})
}

// That a service is closed for its records is told once in Toad's own log, and again when it was open since.
func TestUnavailableStateIsTold(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		path := w.data.serviceFile("hello", "service.json")
		whole, err := os.ReadFile(path)
		must(t, err)
		told := func(want int) {
			t.Helper()
			time.Sleep(10 * time.Minute)
			l, err := w.data.own.open()
			must(t, err)
			events, _, _, err := l.since(0, 9)
			must(t, err)
			if len(events) != want || events[want-1].Type != "state-unavailable" || !strings.HasPrefix(events[want-1].Detail, "hello: ") {
				t.Errorf("%+v", events)
			}
		}
		w.stop()
		must(t, os.WriteFile(path, []byte("garbage"), 0o600))
		w.start()
		told(1)
		must(t, os.WriteFile(path, whole, 0o600))
		w.until2("open", func() bool { return w.s.usable() == nil })
		w.set(func() {
			w.spoil = func(step, at string) error {
				if at == path && step == "write" {
					return syscall.EIO
				}
				return nil
			}
		})
		if err := w.s.tell("unhealthy", "x"); !errors.Is(err, errStorage) {
			t.Errorf("%v", err)
		}
		w.set(func() { w.spoil = nil })
		told(2)
	})
}

// With no server the command takes the locks and looks itself.
func TestAuditWithoutAServer(t *testing.T) {
	var dir, quadlets string
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		for range 3 {
			must(t, w.data.ownEvent("start", "v1"))
		}
		dir, quadlets = w.dir, w.h.quadlets
		verify := func(args ...string) (int, string) {
			var out, errs strings.Builder
			status := run(t.Context(), append(append([]string{"audit", "verify"}, args...), "--data", dir, "--quadlets", quadlets, "--socket", filepath.Join(dir, "none")), &out, &errs)
			return status, out.String() + errs.String()
		}
		if status, said := verify(); status == 0 || !strings.Contains(said, errLocked.Error()) {
			t.Errorf("beside a server: status %d, %s", status, said)
		}
		w.stop()
		defer w.start()
		if status, said := verify(); status != 0 || !strings.Contains(said, "events.jsonl: whole, 3 events, hash ") || !strings.Contains(said, "services/hello/events.jsonl: whole, 6 events") {
			t.Errorf("status %d, %s", status, said)
		}
		path := w.data.serviceFile("hello", "events.jsonl")
		b, err := os.ReadFile(path)
		must(t, err)
		must(t, os.WriteFile(path, b[:strings.LastIndexByte(string(b[:len(b)-1]), '\n')+1], 0o600))
		if status, said := verify("hello"); status != exitRefused || !strings.Contains(said, "services/hello/events.jsonl: line 6 is missing") {
			t.Errorf("status %d, %s", status, said)
		}
		if status, said := verify("nobody"); status != exitRefused || !strings.Contains(said, "no service nobody") {
			t.Errorf("status %d, %s", status, said)
		}
		must(t, os.WriteFile(path, b, 0o600))

		path = filepath.Join(dir, "events.jsonl")
		b, err = os.ReadFile(path)
		must(t, err)
		first := b[:bytes.IndexByte(b, '\n')+1]
		must(t, os.WriteFile(path, first, 0o600))
		if status, said := verify(); status != exitRefused || !strings.Contains(said, "events.jsonl: line 2 is missing") || !strings.Contains(said, "events.head.json names is 3") {
			t.Errorf("Toad's own: status %d, %s", status, said)
		}
		data, err := openData(dir, quadlets)
		must(t, err)
		defer data.close()
		if err := data.ownEvent("start", "v1"); !errors.Is(err, errCorrupt) {
			t.Errorf("its own log was cut, and goes on: %v", err)
		}
		// A kill between the record and the line loses nothing.
		must(t, os.WriteFile(path, b[:bytes.LastIndexByte(b[:len(b)-1], '\n')+1], 0o600))
		if err := data.ownEvent("start", "v1"); err != nil || data.audit("", noLock).Problem != "" {
			t.Errorf("after a kill: %v", err)
		}
	})
}

// Toad's own log loses no event, and tells none that did not happen, whatever step of a write fails.
func TestOwnEventsAtEachStep(t *testing.T) {
	for _, failing := range []string{"keep", "write", "replace", "syncdir", "append"} {
		dir, quadlets := t.TempDir(), t.TempDir()
		data, err := openData(dir, quadlets)
		must(t, err)
		must(t, data.ownEvent("start", "v1"))
		must(t, data.ownEvent("stop", ""))
		defer func() { testingOnlyBoundary = nil }()
		testingOnlyBoundary = func(step, _ string) error {
			if step == failing {
				return syscall.EIO
			}
			return nil
		}
		if err := data.ownEvent("start", "v2"); !errors.Is(err, errStorage) {
			t.Errorf("%s fails: %v", failing, err)
		}
		testingOnlyBoundary = nil
		must(t, data.ownEvent("stop", ""))
		l, err := data.own.open()
		must(t, err)
		events, _, _, err := l.since(0, 9)
		must(t, err)
		var told []string
		for _, e := range events {
			told = append(told, e.Type+e.Detail)
		}
		want := []string{"startv1", "stop", "stop"}
		if failing == "syncdir" || failing == "append" { // its record says that it happened
			want = []string{"startv1", "stop", "startv2", "stop"}
		}
		if c := data.audit("", noLock); c.Problem != "" || !slices.Equal(told, want) {
			t.Errorf("%s failed once: %v, %+v", failing, told, c)
		}
		data.close()
	}
}

func TestCandidatesOutputIsKept(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		w.await(w.deploy("hello", w.push("hello", "1", app{says: "I am one\n"}), 0, "k1").ID, "promoted")
		op := w.deploy("hello", w.push("hello", "2", app{says: "\x1b[31mno database\n", exitAfter: time.Second}), 1, "k2")
		w.await(op.ID, "rolled_back")
		time.Sleep(5 * time.Second)
		a := w.do("GET", "/v1/operations/"+op.ID+"/output", "")
		if want := strings.Repeat("\x1b[31mno database\n", 2); a.status != 200 || a.body != want || a.header.Get("Content-Type") != "application/octet-stream" {
			t.Errorf("status %d, %q", a.status, a.body)
		}
		// Nothing ran of this one.
		w.h.mu.Lock()
		w.h.registryDown = true
		w.h.mu.Unlock()
		op = w.deploy("hello", w.push("hello", "3", app{}), 1, "k3")
		w.await(op.ID, "failed")
		time.Sleep(5 * time.Second)
		w.refused("nothing ran", w.do("GET", "/v1/operations/"+op.ID+"/output", ""), 404, "not_found", "")
	})
}

// Whatever the journal does, the rollback neither waits nor fails, and what is kept is bounded.
func TestCandidatesOutputHoldsUpNothing(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		begun := time.Now()
		op := w.await(w.submit(w.push("bad", app{says: strings.Repeat("x", outputBytes) + "end\n", exitAfter: time.Second})).ID)
		w.expect(op, rolledBack, "restart_budget")
		took := time.Since(begun)
		time.Sleep(5 * time.Second)
		b, err := os.ReadFile(w.s.outputPath(op.ID))
		if must(t, err); len(b) != outputBytes || !strings.HasSuffix(string(b), "xend\n") {
			t.Errorf("%d bytes are kept", len(b))
		}
		w.set(func() { w.h.journalHangs = true })
		begun = time.Now()
		op = w.await(w.submit(w.push("bad too", app{says: "x", exitAfter: time.Second})).ID)
		w.expect(op, rolledBack, "restart_budget")
		if d := time.Since(begun); d != took {
			t.Errorf("it took %s, not %s", d, took)
		}
	})
}

// BenchmarkCommitWithWaiters measures what clients cost that follow a service's events: the time of a commit
// of one event, which all of them are sent, and the memory of each.
//
//	go test -run '^$' -bench CommitWithWaiters -benchtime 200x .
func BenchmarkCommitWithWaiters(b *testing.B) {
	for _, way := range []string{"stream", "poll"} {
		for _, n := range []int{0, 1000} {
			b.Run(fmt.Sprintf("%s/%d", way, n), func(b *testing.B) { commitWithWaiters(b, way, n) })
		}
	}
}

func commitWithWaiters(b *testing.B, way string, n int) {
	h := newFakeHost(b)
	dir, err := os.MkdirTemp("", "toad")
	must(b, err)
	defer os.RemoveAll(dir)
	data, err := openData(dir, h.quadlets)
	must(b, err)
	defer data.close()
	log := slog.New(slog.DiscardHandler)
	d := &daemon{data: data, host: h.host(), log: log, stopping: make(chan struct{}), ctx: b.Context(), services: map[string]*service{}}
	d.enrollments = newEnrollments(b.TempDir(), func() enrollOptions { return enrollOptions{} })
	s := newService("hello", data, d.host, func() (enrolled, error) { return testEnrollment("hello"), nil }, log)
	must(b, s.open())
	d.services["hello"] = s
	ln, err := listenUnix(filepath.Join(dir, "run", "toad.sock"))
	must(b, err)
	srv := newServer(d.handler(), log)
	go srv.Serve(ln)
	defer srv.Close()
	defer close(d.stopping)

	memory := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	before := memory()
	var got atomic.Int64 // events that arrived at all of them
	for range n {
		conn, err := net.Dial("unix", ln.Addr().String())
		must(b, err)
		defer conn.Close()
		r := bufio.NewReaderSize(conn, 1024)
		after := 0
		ask := func() {
			if way == "stream" {
				_, err = io.WriteString(conn, "GET /v1/events?service=hello HTTP/1.1\r\nHost: toad\r\nAccept: text/event-stream\r\n\r\n")
			} else {
				_, err = fmt.Fprintf(conn, "GET /v1/events?service=hello&wait=60&after=%d HTTP/1.1\r\nHost: toad\r\n\r\n", after)
			}
		}
		ask()
		must(b, err)
		go func() {
			for {
				line, err := r.ReadSlice('\n')
				if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
					return
				}
				if way == "stream" && strings.HasPrefix(string(line), "id: ") {
					got.Add(1)
				} else if v, ok := strings.CutPrefix(strings.TrimSpace(string(line)), `"next_cursor": `); ok {
					after, _ = strconv.Atoi(v)
					got.Add(1)
					ask()
				}
			}
		}()
	}
	for n > 0 && runtime.NumGoroutine() < 3*n { // server: connection and its watcher; client: the reader
		time.Sleep(10 * time.Millisecond)
	}
	time.Sleep(200 * time.Millisecond)
	waiting := memory()
	var commits, arrivals []time.Duration
	for i := int64(1); b.Loop(); i++ {
		begun := time.Now()
		must(b, s.commit(func(*record) error { return nil }, event{Type: "reconcile", Detail: "x"}))
		commits = append(commits, time.Since(begun))
		for got.Load() < i*int64(n) {
			time.Sleep(time.Millisecond)
		}
		arrivals = append(arrivals, time.Since(begun))
		time.Sleep(5 * time.Millisecond)
	}
	if n > 0 {
		b.ReportMetric(float64(int64(waiting)-int64(before))/float64(n), "B/waiter")
	}
	for name, list := range map[string][]time.Duration{"commit-p50-µs": commits, "all-told-p50-µs": arrivals} {
		slices.Sort(list)
		b.ReportMetric(float64(list[len(list)/2].Microseconds()), name)
	}
}
