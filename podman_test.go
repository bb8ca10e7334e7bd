package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// fakePodman answers on a Unix socket as Podman 5.4.2 does.
type fakePodman struct {
	t      *testing.T
	socket string
	server *http.Server
	closed chan struct{} // one for each connection that ended

	mu       sync.Mutex
	answers  map[string]func(http.ResponseWriter, *http.Request) // by "METHOD path"
	requests []string
}

func newFakePodman(t *testing.T) (*fakePodman, *podman) {
	f := &fakePodman{
		t:       t,
		socket:  filepath.Join(t.TempDir(), "s"),
		closed:  make(chan struct{}, 100),
		answers: make(map[string]func(http.ResponseWriter, *http.Request)),
	}
	f.start()
	t.Cleanup(func() { f.server.Close() })
	return f, newPodman("unix://" + f.socket)
}

func (f *fakePodman) start() {
	l, err := net.Listen("unix", f.socket)
	if err != nil {
		f.t.Fatal(err)
	}
	f.server = &http.Server{Handler: f, ConnState: func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			f.closed <- struct{}{}
		}
	}}
	go f.server.Serve(l)
}

func (f *fakePodman) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path, ok := strings.CutPrefix(r.URL.Path, "/v5.8.0/libpod")
	if !ok {
		f.t.Errorf("request outside of the versioned API: %s", r.URL)
	}
	f.mu.Lock()
	f.requests = append(f.requests, r.Method+" "+path)
	answer := f.answers[r.Method+" "+path]
	f.mu.Unlock()
	if answer == nil {
		podmanProblem(w, 404, "no such thing")
		return
	}
	answer(w, r)
}

func (f *fakePodman) on(method, path string, answer func(http.ResponseWriter, *http.Request)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answers[method+" "+path] = answer
}

func (f *fakePodman) asked() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.requests...)
}

func podmanAnswer(status int, body string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		io.WriteString(w, body)
	}
}

func podmanProblem(w http.ResponseWriter, status int, message string) {
	body, _ := json.Marshal(map[string]any{"cause": message, "message": message, "response": status})
	podmanAnswer(status, string(body))(w, nil)
}

const (
	idA = "0ec535e92ae91e73d7641a095cbbb4746bd8a8cdedec0830bcda91d9765f5e17"
	idB = "1ec535e92ae91e73d7641a095cbbb4746bd8a8cdedec0830bcda91d9765f5e17"
	idC = "2ec535e92ae91e73d7641a095cbbb4746bd8a8cdedec0830bcda91d9765f5e17"
	idD = "3ec535e92ae91e73d7641a095cbbb4746bd8a8cdedec0830bcda91d9765f5e17"
	idE = "4ec535e92ae91e73d7641a095cbbb4746bd8a8cdedec0830bcda91d9765f5e17"

	imageHex = "4b2c8e629541459aec3c1b7c7cfa4450aa2654e3c7692679653f8ae7b5f8f235"
	imageRef = "registry.example.org/apps/hello@sha256:dbd2d2cd3b89411e3b37efa904d16fbb9103d3c09d26918420c6517e763bc1d8"
)

// Its ImageDigest is another than the reference's, as after a pull of the same image by another digest (G5).
func containerJSON(id, name string) string {
	return `{"Id":"` + id + `","Created":"2026-11-29T15:14:05.2Z","Name":"` + name + `","Image":"` + imageHex + `",
 "ImageDigest":"sha256:ffff","ImageName":"` + imageRef + `","Rootfs":"","Pod":"",
 "State":{"OciVersion":"1.2.0","Status":"running","Running":true,"Pid":1928,"ConmonPid":1926,"ExitCode":0,
  "StartedAt":"2026-11-29T15:14:05.326624183Z","FinishedAt":"0001-01-01T00:00:00Z"},
 "Config":{"Hostname":"0ec535e92ae9","Labels":{"PODMAN_SYSTEMD_UNIT":"hello.service","toad.service":"hello","toad.generation":"3"}},
 "Mounts":[{"Type":"bind","Source":"/home/toad/.local/share/toad","Destination":"/data","RW":true},
  {"Type":"volume","Name":"v","Source":"/home/toad/volumes/v/_data","Destination":"/v"}],
 "NetworkSettings":{"IPAddress":"","Networks":{"apps":{"IPAddress":"10.89.0.3","IPPrefixLen":24,"Gateway":"10.89.0.1","NetworkID":"apps"},
  "six":{"IPAddress":"","GlobalIPv6Address":"fd00::3","GlobalIPv6PrefixLen":64,"IPv6Gateway":"fd00::1"},"none":{"IPAddress":""}}}}`
}

func TestPodmanContainers(t *testing.T) {
	f, p := newFakePodman(t)
	f.on("GET", "/containers/json", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("all") != "true" {
			t.Errorf("asked for running containers only: %s", r.URL)
		}
		podmanAnswer(200, `[
{"Id":"`+idA+`","Names":["hello"],"Labels":null},
{"Id":"`+idB+`","Names":["other"],"Labels":{"PODMAN_SYSTEMD_UNIT":"hello.service"}},
{"Id":"`+idC+`","Names":["third"],"Labels":{"toad.service":"hello"}},
{"Id":"`+idD+`","Names":["hello-2","x"],"Labels":{"PODMAN_SYSTEMD_UNIT":"hello-2.service","toad.service":"hello-2"}},
{"Id":"`+idE+`","Names":["hello"],"Labels":{}}]`)(w, r)
	})
	for id, name := range map[string]string{idA: "hello", idB: "other", idC: "third"} { // idE has vanished
		f.on("GET", "/containers/"+id+"/json", podmanAnswer(200, containerJSON(id, name)))
	}
	found, err := p.Containers(t.Context(), "hello", "hello.service", "hello")
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, c := range found {
		ids = append(ids, c.ID)
	}
	if want := []string{idA, idB, idC}; !reflect.DeepEqual(ids, want) {
		t.Errorf("found %v, want %v", ids, want)
	}
	if found, err := p.Containers(t.Context(), "", "", ""); err != nil || len(found) != 0 {
		t.Errorf("empty names found %v, %v", found, err)
	}

	// What cannot be inspected for another reason is not taken for gone.
	f.on("GET", "/containers/"+idE+"/json", func(w http.ResponseWriter, _ *http.Request) { podmanProblem(w, 500, "locked") })
	if found, err := p.Containers(t.Context(), "hello", "", ""); err != nil || len(found) != 1 {
		t.Errorf("by service: %v, %v", found, err)
	}
	if _, err := p.Containers(t.Context(), "", "", "hello"); err == nil || errors.Is(err, errNotFound) {
		t.Errorf("inspection that fails: %v", err)
	}
}

func TestPodmanContainer(t *testing.T) {
	f, p := newFakePodman(t)
	for _, nameOrID := range []string{"hello", idA, "0ec535e9", idA[:12]} {
		f.on("GET", "/containers/"+nameOrID+"/json", podmanAnswer(200, containerJSON(idA, "hello")))
	}
	want := container{
		ID: idA, Name: "hello", Status: "running", ConmonPID: 1926, ImageName: imageRef, ImageID: "sha256:" + imageHex,
		Unit:      "hello.service",
		Labels:    map[string]string{"PODMAN_SYSTEMD_UNIT": "hello.service", "toad.service": "hello", "toad.generation": "3"},
		StartedAt: time.Date(2026, 11, 29, 15, 14, 5, 326624183, time.UTC),
		Addresses: map[string]string{"apps": "10.89.0.3", "six": "fd00::3"},
	}
	for _, nameOrID := range []string{"hello", idA} {
		if got, err := p.Container(t.Context(), nameOrID); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", nameOrID, got, err)
		}
	}
	for _, nameOrID := range []string{"nobody", "0ec535e9"} {
		if _, err := p.Container(t.Context(), nameOrID); !errors.Is(err, errNotFound) {
			t.Errorf("%s: %v", nameOrID, err)
		}
	}

	mounts, err := p.Self(t.Context(), idA[:12])
	if err != nil || !reflect.DeepEqual(mounts, map[string]string{"/data": "/home/toad/.local/share/toad", "/v": "/home/toad/volumes/v/_data"}) {
		t.Errorf("self: %v %v", mounts, err)
	}
	for network, want := range map[string][]subnet{
		"apps": {{netip.MustParsePrefix("10.89.0.0/24"), netip.MustParseAddr("10.89.0.1")}},
		"six":  {{netip.MustParsePrefix("fd00::/64"), netip.MustParseAddr("fd00::1")}},
		"none": nil, "nobody": nil,
	} {
		if got, err := p.Subnets(t.Context(), idA[:12], network); err != nil || !slices.Equal(got, want) {
			t.Errorf("network %s: %v, %v", network, got, err)
		}
	}
	if _, err := p.Self(t.Context(), "hello"); !errors.Is(err, errNotFound) {
		t.Errorf("self by a name: %v", err)
	}
}

func TestPodmanErrors(t *testing.T) {
	f, p := newFakePodman(t)
	for name, answer := range map[string]func(http.ResponseWriter, *http.Request){
		"says": func(w http.ResponseWriter, _ *http.Request) {
			podmanProblem(w, 500, "no such container: not found: 404")
		},
		"clash":  func(w http.ResponseWriter, _ *http.Request) { podmanProblem(w, 409, "not found") },
		"plain":  func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "404", http.StatusBadGateway) },
		"broken": podmanAnswer(500, `{"cause"`),
		"odd":    podmanAnswer(200, `[]`),
	} {
		f.on("GET", "/containers/"+name+"/json", answer)
		if _, err := p.Container(t.Context(), name); err == nil || errors.Is(err, errNotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPodmanRemove(t *testing.T) {
	f, p := newFakePodman(t)
	f.on("DELETE", "/containers/"+idA, func(w http.ResponseWriter, r *http.Request) {
		if q := r.URL.Query(); q.Get("force") != "true" || q.Get("timeout") != "0" || q.Get("volumes") != "false" {
			t.Errorf("query %v", q)
		}
		podmanAnswer(200, `[{"Id":"`+idA+`"}]`)(w, r)
	})
	f.on("DELETE", "/containers/"+idB, func(w http.ResponseWriter, _ *http.Request) { podmanProblem(w, 500, "unkillable") })
	f.on("DELETE", "/containers/"+idC, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	if err := p.Remove(t.Context(), idA); err != nil {
		t.Error(err)
	}
	if err := p.Remove(t.Context(), idD); err != nil {
		t.Errorf("a container that is not there: %v", err)
	}
	if err := p.Remove(t.Context(), idB); err == nil {
		t.Error("an error of Podman was lost")
	}
	if err := p.Remove(t.Context(), idC); err == nil {
		t.Error("a broken connection was taken for an answer")
	}
	if got := len(f.asked()); got != 4 {
		t.Errorf("%d requests for 4 removals: %v", got, f.asked())
	}
	for _, id := range []string{"", "hello", idA[:12], idA + "/..", strings.ToUpper(idA)} {
		if err := p.Remove(t.Context(), id); err == nil {
			t.Errorf("%q was taken for an id", id)
		}
	}
	if got := len(f.asked()); got != 4 {
		t.Errorf("something was sent for what is no id: %v", f.asked())
	}
}

func TestPodmanImage(t *testing.T) {
	f, p := newFakePodman(t)
	f.on("GET", "/images/"+imageRef+"/json", podmanAnswer(200, `{"Id":"`+imageHex+`","Digest":"sha256:ffff"}`))
	if id, err := p.Image(t.Context(), imageRef); err != nil || id != "sha256:"+imageHex {
		t.Errorf("%q, %v", id, err)
	}
	if _, err := p.Image(t.Context(), "registry.example.org/apps/none@sha256:"+imageHex); !errors.Is(err, errNotFound) {
		t.Errorf("an image that is not there: %v", err)
	}
}

func TestPodmanLoad(t *testing.T) {
	broke := errors.New("the disk")
	arrived := make(chan struct{})
	ok := podmanAnswer(200, `{"Names":["`+imageRef+`"]}`)
	tests := []struct {
		name   string
		answer func(http.ResponseWriter, *http.Request)
		write  func(*io.PipeWriter) error
		want   error // nil: none; io.EOF: any
	}{
		{"whole", func(w http.ResponseWriter, r *http.Request) {
			if body, err := io.ReadAll(r.Body); err != nil || string(body) != "archive" || r.Header.Get("Content-Type") != "application/x-tar" {
				t.Errorf("got %q, %v", body, err)
			}
			ok(w, r)
		}, func(w *io.PipeWriter) error {
			io.WriteString(w, "archive")
			return w.Close()
		}, nil},
		{"source breaks", func(w http.ResponseWriter, r *http.Request) {
			r.Body.Read(make([]byte, 1))
			close(arrived)
			if _, err := io.ReadAll(r.Body); err == nil {
				t.Error("half an archive looks whole")
			}
			podmanProblem(w, 500, "unexpected EOF")
		}, func(w *io.PipeWriter) error {
			w.Write(make([]byte, 1<<20))
			<-arrived
			return w.CloseWithError(broke)
		}, broke},
		{"connection breaks", func(_ http.ResponseWriter, r *http.Request) {
			r.Body.Read(make([]byte, 1))
			panic(http.ErrAbortHandler)
		}, writeWithoutEnd, io.EOF},
		{"refused at once", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Connection", "close")
			podmanProblem(w, 500, "no space")
		}, writeWithoutEnd, io.EOF},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f, p := newFakePodman(t)
			f.on("POST", "/images/load", tt.answer)
			r, w := io.Pipe()
			wrote := make(chan error, 1)
			go func() { wrote <- tt.write(w) }()
			err := p.Load(t.Context(), r)
			if (err == nil) != (tt.want == nil) || tt.want != io.EOF && !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
			<-wrote // the writer ends too
			if got := f.asked(); len(got) != 1 {
				t.Errorf("sent %v", got)
			}
		})
	}
}

func writeWithoutEnd(w *io.PipeWriter) error {
	for {
		if _, err := w.Write(bytes.Repeat([]byte("x"), 1<<20)); err != nil {
			return err
		}
	}
}

func TestPodmanLoadUnreachable(t *testing.T) {
	p := newPodman("unix://" + filepath.Join(t.TempDir(), "none"))
	r, w := io.Pipe()
	wrote := make(chan error, 1)
	go func() { wrote <- writeWithoutEnd(w) }()
	if err := p.Load(t.Context(), r); !errors.Is(err, errUnreachable) {
		t.Errorf("loading into nothing: %v", err)
	}
	<-wrote
}

func TestPodmanStarts(t *testing.T) {
	f, p := newFakePodman(t)
	since := time.Date(2026, 11, 29, 15, 14, 5, 500, time.UTC)
	operation := "01k9zxv3m5abcdefghjkmnpqrs"
	event := func(kind, action, name string, after time.Duration) string {
		return fmt.Sprintf(`{"status":%[2]q,"Type":%[1]q,"Action":%[2]q,"Actor":{"ID":%[3]q,"Attributes":{"name":%[4]q,"image":%[5]q,"toad.operation":%[8]q}},"scope":"local","time":%[6]d,"timeNano":%[7]d}`,
			kind, action, idA, name, imageRef, since.Add(after).Unix(), since.Add(after).UnixNano(), operation) + "\n"
	}
	lines := event("container", "start", "hello", -1) + // before
		event("container", "start", "hello", 0) +
		event("container", "died", "hello", 1) +
		event("container", "start", "hello-2", 2) +
		event("image", "start", "hello", 2) +
		event("container", "start", "hello", time.Hour) +
		strings.Replace(event("container", "start", "hello", time.Hour), operation, "01k9zxv3m5abcdefghjkmnpqrt", 1)
	f.on("GET", "/events", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		var filters map[string][]string
		if err := json.Unmarshal([]byte(q.Get("filters")), &filters); err != nil {
			t.Error(err)
		}
		want := url.Values{"type": {"container"}, "container": {"hello"}, "event": {"start"}}
		if q.Get("stream") != "false" || q.Get("since") != "2026-11-29T15:14:05.0000005Z" || !reflect.DeepEqual(url.Values(filters), want) {
			t.Errorf("query %v", q)
		}
		podmanAnswer(200, lines)(w, r)
	})
	if n, err := p.Starts(t.Context(), "hello", operation, since); err != nil || n != 2 {
		t.Errorf("counted %d, %v", n, err)
	}
	lines = lines[:len(lines)-10]
	if n, err := p.Starts(t.Context(), "hello", operation, since); err == nil {
		t.Errorf("counted %d in a torn answer", n)
	}
	f.on("GET", "/events", func(w http.ResponseWriter, _ *http.Request) { podmanProblem(w, 500, "no journal") })
	if n, err := p.Starts(t.Context(), "hello", operation, since); err == nil {
		t.Errorf("counted %d without a log", n)
	}
}

func TestPodmanExists(t *testing.T) {
	f, p := newFakePodman(t)
	for _, kind := range []string{"network", "secret", "volume"} {
		f.on("GET", "/"+kind+"s/there/exists", podmanAnswer(204, ""))
		f.on("GET", "/"+kind+"s/sick/exists", func(w http.ResponseWriter, _ *http.Request) { podmanProblem(w, 500, "not found") })
		if ok, err := p.Exists(t.Context(), kind, "there"); !ok || err != nil {
			t.Errorf("%s: %v, %v", kind, ok, err)
		}
		if ok, err := p.Exists(t.Context(), kind, "gone"); ok || err != nil {
			t.Errorf("%s that is gone: %v, %v", kind, ok, err)
		}
		if _, err := p.Exists(t.Context(), kind, "sick"); err == nil {
			t.Errorf("%s: an error was taken for an answer", kind)
		}
	}
	if _, err := p.Exists(t.Context(), "pod", "x"); err == nil {
		t.Error("no such kind")
	}
}

// podmanCalls is every call, with what it needs to get as far as the socket.
func podmanCalls(ctx context.Context, p *podman) map[string]func() error {
	return map[string]func() error{
		"Containers": func() error { _, err := p.Containers(ctx, "a", "b", "c"); return err },
		"Container":  func() error { _, err := p.Container(ctx, "a"); return err },
		"Remove":     func() error { return p.Remove(ctx, idA) },
		"Image":      func() error { _, err := p.Image(ctx, imageRef); return err },
		"Starts":     func() error { _, err := p.Starts(ctx, "a", "01", time.Now()); return err },
		"Exists":     func() error { _, err := p.Exists(ctx, "network", "a"); return err },
		"Self":       func() error { _, err := p.Self(ctx, idA[:12]); return err },
		"Subnets":    func() error { _, err := p.Subnets(ctx, idA[:12], "toad"); return err },
		"Load":       func() error { return p.Load(ctx, strings.NewReader("archive")) },
	}
}

// A socket that accepts and never answers, or stops in the middle of an answer (CASES S4).
func TestPodmanHangs(t *testing.T) {
	for _, first := range []string{"", "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"} {
		path := filepath.Join(t.TempDir(), "s")
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				defer c.Close()
				go func() {
					c.Read(make([]byte, 1))
					io.WriteString(c, first)
				}()
			}
		}()
		p := newPodman("unix://" + path)
		p.timeout = 50 * time.Millisecond
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond) // for Load
		defer cancel()
		var calls sync.WaitGroup
		for name, call := range podmanCalls(t.Context(), p) {
			if name == "Load" {
				call = podmanCalls(ctx, p)[name]
			}
			calls.Go(func() {
				began := time.Now()
				if err := call(); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%s: %v", name, err)
				}
				if took := time.Since(began); took > 5*time.Second { // on a busy machine
					t.Errorf("%s took %s", name, took)
				}
			})
		}
		calls.Wait()
	}
}

func TestPodmanCanceled(t *testing.T) {
	_, p := newFakePodman(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for name, call := range podmanCalls(ctx, p) {
		if err := call(); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Podman's service ends by itself when it is idle, and may be restarted at any time.
func TestPodmanRestarted(t *testing.T) {
	f, p := newFakePodman(t)
	f.on("GET", "/networks/apps/exists", podmanAnswer(204, ""))
	f.on("POST", "/images/load", podmanAnswer(200, `{}`))
	for range 3 {
		if ok, err := p.Exists(t.Context(), "network", "apps"); !ok || err != nil {
			t.Errorf("%v, %v", ok, err)
		}
		if err := p.Load(t.Context(), strings.NewReader("archive")); err != nil {
			t.Error(err)
		}
		f.server.Close()
		if _, err := p.Exists(t.Context(), "network", "apps"); err == nil || errors.Is(err, errNotFound) {
			t.Errorf("with nobody there: %v", err)
		}
		f.start()
	}
}

// No connection outlives its answer: an idle one would keep Podman's service alive (measured).
func TestPodmanLetsServiceSleep(t *testing.T) {
	f, p := newFakePodman(t)
	for name, call := range podmanCalls(t.Context(), p) {
		call() // what is answered does not matter
		select {
		case <-f.closed:
		case <-time.After(10 * time.Second):
			t.Errorf("%s left its connection open", name)
		}
	}
}
