package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A large host: so many services, each with so many operations that ended long ago.
const (
	largeServices = 100
	largeArchive  = 1000
)

// largeHost is a daemon with a data directory and enrollments on the disk, over a host in memory.
type largeHost struct {
	*daemon
	dir, enrollment string
	fake            *fakeHost
	ops             []string // of each service its last operation
	old             []string // and one that is archived
	end             func()
}

var largeLog = slog.New(slog.DiscardHandler)

// newLargeHost enrolls and deploys so many services, with so many archived operations each.
func newLargeHost(b *testing.B, services, archive int) *largeHost {
	dir, err := os.MkdirTemp("", "toad") // short: a socket's path has at most 108 bytes
	must(b, err)
	b.Cleanup(func() { os.RemoveAll(dir) })
	l := &largeHost{dir: filepath.Join(dir, "data"), enrollment: filepath.Join(dir, "enrollment"), fake: newFakeHost(b)}
	must(b, os.Mkdir(l.dir, 0o700))
	must(b, os.Mkdir(l.enrollment, 0o700))
	l.fake.data = l.dir
	for i := range services {
		name := fmt.Sprintf("s%d", i)
		en := testEnrollment(name)
		en.Repository = "registry.example.org/apps/" + name
		en.Readiness.Interval, en.Probation.StabilityWindow = duration(300*time.Millisecond), duration(time.Second)
		text, err := json.Marshal(en.enrollment)
		must(b, err)
		must(b, os.WriteFile(filepath.Join(l.enrollment, name+".json"), text, 0o600))
		must(b, os.WriteFile(filepath.Join(l.enrollment, name+".container"), en.Template, 0o600))
	}
	l.begin(b)
	for i := range services {
		op := l.deploy(b, i, "1", 0)
		l.ops = append(l.ops, op.ID)
	}
	for _, s := range l.all() {
		l.promoted(b, s)
		op := *s.op()
		op.State, op.Timeline[len(op.Timeline)-1].State = hasFailed, hasFailed
		for _, sub := range []string{"operations", "keys"} {
			must(b, makeDir(s.data.serviceFile(s.name, sub)))
		}
		for i := range archive {
			op.ID = newOperationID(time.Now().Add(-time.Duration(i+1) * time.Minute))
			op.Key = op.ID
			text, err := encodeRecord(&archived{Version: recordVersion, Service: s.name, Operation: op})
			must(b, err)
			must(b, os.WriteFile(s.data.serviceFile(s.name, "operations", op.ID+".json"), text, 0o600))
			text, err = encodeRecord(&keyFile{Version: recordVersion, Operation: op.ID, State: op.State, FinishedAt: *op.FinishedAt})
			must(b, err)
			must(b, os.WriteFile(s.data.keyPath(s.name, op.Key), text, 0o600))
			if i == archive/2 { // the oldest are pruned
				l.old = append(l.old, op.ID)
			}
		}
	}
	return l
}

func (l *largeHost) begin(b *testing.B) {
	data, err := openData(l.dir, l.fake.quadlets)
	must(b, err)
	ctx, cancel := context.WithCancel(context.Background())
	l.daemon = &daemon{data: data, host: l.fake.host(), log: largeLog, stopping: make(chan struct{}), ctx: ctx, services: map[string]*service{}}
	l.enrollments = newEnrollments(l.enrollment, func() enrollOptions {
		return enrollOptions{quadlets: l.fake.quadlets, claims: l.claims()}
	})
	l.refresh()
	go l.lookUntil(ctx)
	l.end = sync.OnceFunc(func() {
		cancel()
		l.wg.Wait()
		data.close()
	})
	b.Cleanup(l.end)
}

// request asks the administration's handler, whose answer must be one of success.
func (l *largeHost) request(b *testing.B, method, path, body string, into any) {
	b.Helper()
	rec := httptest.NewRecorder()
	l.handler().ServeHTTP(rec, httptest.NewRequest(method, path, strings.NewReader(body)))
	if rec.Code/100 != 2 {
		b.Fatalf("%s %s: %d %s", method, path, rec.Code, rec.Body)
	}
	must(b, json.Unmarshal(rec.Body.Bytes(), into))
}

func (l *largeHost) deploy(b *testing.B, i int, version string, expected int64) (op wireOperation) {
	name := fmt.Sprintf("s%d", i)
	image := l.fake.push("registry.example.org/apps/"+name, version, app{})
	l.request(b, "POST", "/v1/deployments", deployBody(name, image, expected, "key-"+version), &op)
	return op
}

// promoted waits until the service's operation is, and until what follows from it is done.
func (l *largeHost) promoted(b *testing.B, s *service) {
	b.Helper()
	for end := time.Now().Add(time.Minute); ; {
		changed := s.changed()
		if r := s.rec.Load(); r.Operation.State == promoted && r.Installed {
			if _, err := s.data.operation(s.name, r.Operation.ID); err == nil {
				return
			}
		} else if r.Operation.State.terminal() && r.Operation.State != promoted || time.Now().After(end) {
			b.Fatalf("%s is %s: %+v", s.name, r.Operation.State, r.Operation.Failure)
		}
		select {
		case <-changed:
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// percentiles reports the median and the 99th of a hundred.
func percentiles(b *testing.B, took []time.Duration) {
	slices.Sort(took)
	for _, p := range []int{50, 99} {
		b.ReportMetric(float64(took[len(took)*p/100].Nanoseconds())/1000, fmt.Sprintf("p%d-µs", p))
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkRead measures reads over TCP with a token while 100 services have 100,000 archived operations: of a
// service, of its last operation, which are answered from memory, and of an archived one, which is a file.
//
//	go test -run '^$' -bench Read -benchtime 20000x .
func BenchmarkRead(b *testing.B) {
	l := newLargeHost(b, largeServices, largeArchive)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(b, err)
	srv := newServer(l.tcpHandler(), largeLog)
	go srv.Serve(&ownPeers{Listener: ln, log: largeLog, own: net.InterfaceAddrs, slots: make(chan struct{}, maxConns)})
	defer srv.Close()
	var tokens []string
	for i := range largeServices {
		var issued wireIssued
		l.request(b, "POST", "/v1/tokens", fmt.Sprintf(`{"service":"s%d","label":"l","verbs":["read"]}`, i), &issued)
		tokens = append(tokens, issued.Token)
	}
	for what, path := range map[string]func(i int) string{
		"service":   func(i int) string { return fmt.Sprintf("/v1/services/s%d", i) },
		"operation": func(i int) string { return "/v1/operations/" + l.ops[i] },
		"archived":  func(i int) string { return "/v1/operations/" + l.old[i] },
	} {
		for _, clients := range []int{1, 10, 100} {
			b.Run(fmt.Sprintf("%s/%d", what, clients), func(b *testing.B) {
				took := make([]time.Duration, b.N)
				var next atomic.Int64
				var all sync.WaitGroup
				for c := range clients {
					all.Go(func() {
						client := &http.Client{Transport: &http.Transport{}}
						defer client.CloseIdleConnections()
						req, err := http.NewRequest("GET", "http://"+ln.Addr().String()+path(c), nil)
						must(b, err)
						req.Header.Set("Authorization", "Bearer "+tokens[c])
						for i := next.Add(1); i <= int64(b.N); i = next.Add(1) {
							begun := time.Now()
							resp, err := client.Do(req)
							if err != nil {
								b.Error(err)
								return
							}
							_, _ = io.Copy(io.Discard, resp.Body)
							resp.Body.Close()
							if took[i-1] = time.Since(begun); resp.StatusCode != http.StatusOK {
								b.Errorf("status %d", resp.StatusCode)
								return
							}
						}
					})
				}
				all.Wait()
				percentiles(b, took)
			})
		}
	}
}

// BenchmarkAccept measures the acceptance of a deployment next to what it must write at least: the same
// bytes of the same records, each written and synced by hand in the same directory.
//
//	TMPDIR=/var/tmp go test -run '^$' -bench Accept -benchtime 10x .
func BenchmarkAccept(b *testing.B) {
	l := newLargeHost(b, 1, largeArchive)
	s := l.all()[0]
	path := s.data.serviceFile(s.name, "service.json")
	events := s.data.serviceFile(s.name, "events.jsonl")
	var accepted, bare []time.Duration
	for i := int64(1); b.Loop(); i++ {
		before, err := os.Stat(events)
		must(b, err)
		begun := time.Now()
		l.deploy(b, 0, strconv.FormatInt(i+1, 10), i)
		accepted = append(accepted, time.Since(begun))
		lines := readFile(b, events)[before.Size():]
		lines = lines[:bytes.IndexByte(lines, '\n')+1] // of the acceptance, not of what followed
		texts := [][]byte{readFile(b, path), lines}
		begun = time.Now()
		for n, text := range texts {
			f, err := os.Create(fmt.Sprintf("%s.bare%d", path, n))
			must(b, err)
			_, err = f.Write(text)
			must(b, cmp.Or(err, f.Sync(), f.Close()))
		}
		bare = append(bare, time.Since(begun))
		for n := range texts {
			must(b, os.Remove(fmt.Sprintf("%s.bare%d", path, n)))
		}
		l.promoted(b, s)
	}
	percentiles(b, accepted)
	slices.Sort(bare)
	half := len(bare) / 2
	b.ReportMetric(float64(bare[half].Microseconds()), "bare-p50-µs")
	b.ReportMetric(float64(accepted[half])/float64(bare[half]), "accept/bare")
}

// BenchmarkStart measures a start of the server, to its first answer about every service, and what it takes
// of memory then: with 100 services and 100,000 archived operations, next to one with an empty directory.
//
//	go test -run '^$' -bench Start -benchtime 5x .
func BenchmarkStart(b *testing.B) {
	program := filepath.Join(b.TempDir(), "toad")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	// start runs it once, and tells how long it took and how many MiB are resident.
	start := func(l *largeHost, want int) (time.Duration, float64) {
		cmd := exec.Command(program, "serve", "--data", l.dir, "--enrollment", l.enrollment, "--quadlets", l.fake.quadlets,
			"--bus", "unix:path="+l.dir+"/none", "--podman", "unix://"+l.dir+"/none", "--listen", "", "--web-listen", "")
		client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", filepath.Join(l.dir, "run", "toad.sock"))
		}}}
		defer client.CloseIdleConnections()
		begun := time.Now()
		must(b, cmd.Start())
		defer cmd.Wait()
		defer cmd.Process.Kill()
		for {
			var list wireServices
			resp, err := client.Get("http://toad/v1/services")
			if err != nil {
				if time.Since(begun) > time.Minute {
					b.Fatal(err)
				}
				time.Sleep(time.Millisecond)
				continue
			}
			err = json.NewDecoder(resp.Body).Decode(&list)
			resp.Body.Close()
			took := time.Since(begun)
			if must(b, err); len(list.Services) != want {
				b.Fatalf("%d services", len(list.Services))
			}
			for _, s := range list.Services {
				if s.Problem != "" || s.Generation != 1 {
					b.Fatalf("%+v", s)
				}
			}
			var kib float64
			for line := range strings.Lines(string(readFile(b, fmt.Sprintf("/proc/%d/status", cmd.Process.Pid)))) {
				if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
					_, err := fmt.Sscan(v, &kib)
					must(b, err)
				}
			}
			return took, kib / 1024
		}
	}
	empty, full := newLargeHost(b, 0, 0), newLargeHost(b, largeServices, largeArchive)
	empty.end()
	full.end()
	median := func(v []float64) float64 { slices.Sort(v); return v[len(v)/2] }
	var ms, mib [2][]float64
	for b.Loop() {
		for i, l := range []*largeHost{empty, full} {
			took, rss := start(l, len(l.ops))
			ms[i], mib[i] = append(ms[i], float64(took.Microseconds())/1000), append(mib[i], rss)
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(ms[0]), "ms-empty")
	b.ReportMetric(median(ms[1]), "ms-full")
	b.ReportMetric(median(mib[0]), "MiB-empty")
	b.ReportMetric(median(mib[1]), "MiB-full")
	b.ReportMetric(median(mib[1])/median(mib[0]), "full/empty-MiB")
}
