package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// tracedDir, when set, makes the test binary the one that is traced: it accepts two deployments below that
// directory.
const tracedDir = "TOAD_TEST_TRACED"

// An acceptance as the kernel saw it: what is answered is on the disk, in the order that a power cut at any
// place needs. The first one of a service and one that follows another are each proven whole.
func TestAcceptanceTraced(t *testing.T) {
	if os.Getenv(tracedDir) != "" {
		acceptTraced(t)
		return
	}
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Fatal("this test needs strace: install Debian's package strace")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir()) // the kernel tells paths without links
	must(t, err)
	self, err := os.Executable()
	must(t, err)
	out := filepath.Join(dir, "trace")
	cmd := exec.Command(strace, "-f", "-y", "-s", "2000", "-o", out, "-e", "trace=openat,write,pwrite64,fsync,fdatasync,?rename,?renameat,renameat2,linkat,unlinkat",
		self, "-test.run=^TestAcceptanceTraced$", "-test.count=1")
	cmd.Env = append(os.Environ(), tracedDir+"="+dir, "TMPDIR="+dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("tracing: %v\n%s", err, out)
	}
	trace, err := os.ReadFile(out)
	must(t, err)
	calls := parseTrace(string(trace))
	for _, name := range []string{"first", "next"} {
		between, service, err := acceptance(calls, name)
		if err != nil {
			t.Fatal(err)
		}
		steps := acceptanceSteps(service)
		at, complaint := follow(between, steps)
		if complaint != "" {
			t.Errorf("the %s acceptance: %s\n%s", name, complaint, excerpt(between, service))
			continue
		}
		// The judge itself: with any one step gone it complains.
		for i, step := range steps {
			less := slices.Delete(slices.Clone(between), at[i], at[i]+1)
			if _, complaint := follow(less, steps); complaint == "" {
				t.Errorf("the %s acceptance passes without: %s", name, step.what)
			}
		}
		t.Logf("the %s acceptance:\n%s", name, excerpt(between, service))
		if name == "next" { // the operation before it was archived while nothing was asked
			if _, complaint := follow(archiving(calls), archiveSteps(service)); complaint != "" {
				t.Errorf("the archive: %s\n%s", complaint, excerpt(archiving(calls), service))
			}
		}
	}
}

// archiving is what concerned the archive between the first answer and the next request.
func archiving(calls []tracedCall) (between []tracedCall) {
	on := false
	for _, c := range calls {
		switch {
		case !strings.HasPrefix(c.text, "openat(") || !strings.Contains(c.text, `"/toad-marker/`):
		case strings.Contains(c.text, "first-answer"):
			on = true
		case strings.Contains(c.text, "next-begin"):
			return between
		}
		if on && (strings.Contains(c.text, "/operations") || strings.Contains(c.text, "/keys")) {
			between = append(between, c)
		}
	}
	return between
}

// archiveSteps: the record, then the key, each durable.
func archiveSteps(service string) (steps []traceStep) {
	dir := regexp.QuoteMeta(service)
	for _, file := range []string{"/operations/.[0-9a-z]{26}\\.json[0-9]+", "/keys/.[0-9a-f]{64}\\.json[0-9]+"} {
		sub := file[:strings.LastIndex(file, "/")]
		steps = append(steps,
			traceStep{file + " is written", `^write\(\d+<` + dir + file + `>, "\{\\n  \\"version\\": 1,.*\) += [1-9]`},
			traceStep{"it is synced", `^f(data)?sync\(\d+<` + dir + file + `>\) += 0$`},
			traceStep{"it has its name", `^rename(at2?)?\(.*"` + dir + file + `", .*"` + dir + sub + `/.*\.json".*\) += 0$`},
			traceStep{"its directory is synced", `^fsync\(\d+<` + dir + sub + `>\) += 0$`})
	}
	return steps
}

// mark leaves a line in the trace.
func mark(name string) {
	if f, err := os.Open("/toad-marker/" + name); err == nil {
		f.Close()
	}
}

// answerMarked marks where an answer begins.
type answerMarked struct {
	*httptest.ResponseRecorder
	name string
}

func (w *answerMarked) WriteHeader(status int) {
	mark(w.name + "-answer")
	w.ResponseRecorder.WriteHeader(status)
}

func acceptTraced(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		mark("data" + w.dir)
		for i, name := range []string{"first", "next"} {
			image := w.h.push("registry.example.org/apps/hello", name, app{readyAfter: time.Second})
			r, err := http.NewRequest("POST", "http://toad/v1/deployments", strings.NewReader(deployBody("hello", image, int64(i), name)))
			must(t, err)
			rec := &answerMarked{httptest.NewRecorder(), name}
			mark(name + "-begin")
			w.handler.ServeHTTP(rec, r)
			if rec.Code != http.StatusAccepted {
				t.Fatalf("%s: %d %s", name, rec.Code, rec.Body)
			}
			time.Sleep(10 * time.Minute) // on the bubble's clock: promoted, archived and idle
			synctest.Wait()
			s, err := w.d.service("hello")
			must(t, err)
			if op := s.op(); op.State != promoted {
				t.Fatalf("%s ended %s", name, op.State)
			}
		}
	})
}

// tracedCall is one system call: the lines on which it begins and ends, and its text in one piece.
type tracedCall struct {
	begin, end int
	text       string
}

// parseTrace reads what strace -f -o wrote. A call that another thread interrupts stands on two lines.
func parseTrace(trace string) []tracedCall {
	var calls []tracedCall
	open := map[string]int{} // thread → its unfinished call
	n := 0
	for line := range strings.Lines(trace) {
		n++
		thread, text, ok := strings.Cut(strings.TrimRight(line, "\n"), " ")
		text = strings.TrimLeft(text, " ")
		if !ok {
			continue
		}
		if i, ok := open[thread]; ok && strings.HasPrefix(text, "<... ") {
			_, rest, _ := strings.Cut(text, " resumed>")
			calls[i].text += rest
			calls[i].end = n
			delete(open, thread)
			continue
		}
		text, unfinished := strings.CutSuffix(text, " <unfinished ...>")
		if unfinished {
			open[thread] = len(calls)
		}
		calls = append(calls, tracedCall{n, n, text})
	}
	return calls
}

// acceptance is what was called between the request and the answer, the answer's mark included, and the
// directory of the service.
func acceptance(calls []tracedCall, name string) (between []tracedCall, service string, err error) {
	find := func(marker string) int {
		// A program that is copied is written, and has the marks in it.
		return slices.IndexFunc(calls, func(c tracedCall) bool {
			return strings.HasPrefix(c.text, "openat(") && strings.Contains(c.text, `"/toad-marker/`+marker)
		})
	}
	data, begin, answer := find("data"), find(name+"-begin"), find(name+"-answer")
	if data < 0 || begin < 0 || answer < begin {
		return nil, "", fmt.Errorf("the trace of %d calls has not the marks of the %s acceptance (%d %d %d)", len(calls), name, data, begin, answer)
	}
	m := regexp.MustCompile(`"/toad-marker/data([^"]+)"`).FindStringSubmatch(calls[data].text)
	return calls[begin : answer+1], m[1] + "/services/hello", nil
}

// traceStep is one call that has to be there, after the one before it has ended.
type traceStep struct{ what, pattern string }

func acceptanceSteps(service string) []traceStep {
	dir := regexp.QuoteMeta(service)
	const temporary = `/\.service\.json[0-9]+`
	return []traceStep{
		{"a temporary file is made beside service.json", `^openat\(.*"` + dir + temporary + `", O_RDWR\|O_CREAT\|O_EXCL\|O_CLOEXEC, 0600\) += \d`},
		{"the whole record is written to it", `^write\(\d+<` + dir + temporary + `>, "\{\\n  \\"version\\": 1,.*\) += [1-9]`},
		{"it is synced", `^f(data)?sync\(\d+<` + dir + temporary + `>\) += 0$`},
		{"it is renamed over service.json", `^rename(at2?)?\(.*"` + dir + temporary + `", .*"` + dir + `/service\.json".*\) += 0$`},
		{"the directory is synced", `^fsync\(\d+<` + dir + `>\) += 0$`},
		{"the event is appended", `^p?write(64)?\(\d+<` + dir + `/events\.jsonl>, "\{\\"cursor\\":\d+,.*\\"type\\":\\"deploy\\".*\) += [1-9]`},
		{"the event log is synced", `^f(data)?sync\(\d+<` + dir + `/events\.jsonl>\) += 0$`},
		{"the answer begins", `-answer"`},
	}
}

// follow finds each step after the end of the one before it, and says which is missing. Whatever is written
// to a file of the commit apart from these steps is one write too many.
func follow(calls []tracedCall, steps []traceStep) (at []int, complaint string) {
	end := 0
	for _, step := range steps {
		re := regexp.MustCompile(step.pattern)
		i := slices.IndexFunc(calls, func(c tracedCall) bool { return c.begin > end && re.MatchString(c.text) })
		if i < 0 {
			return at, "missing after line " + fmt.Sprint(end) + ": " + step.what
		}
		at = append(at, i)
		end = calls[i].end
	}
	names := regexp.MustCompile(`^(p?write|rename).*/(\.?service\.json[0-9]*|events\.jsonl)[">]`)
	for i, c := range calls {
		if names.MatchString(c.text) && !strings.Contains(c.text, "service.json.prev") && !slices.Contains(at, i) {
			return at, fmt.Sprintf("line %d changes a file of the commit once more", c.begin)
		}
	}
	return at, ""
}

// excerpt is what a person reads: the calls that concern the service, without the long texts.
func excerpt(calls []tracedCall, service string) string {
	var b strings.Builder
	text := regexp.MustCompile(`"((?:[^"\\]|\\.){60})(?:[^"\\]|\\.)*"`)
	for _, c := range calls {
		if s := c.text; strings.Contains(s, service) || strings.Contains(s, "/toad-marker/") {
			s = text.ReplaceAllString(strings.ReplaceAll(s, service, "…"), `"$1…"`)
			fmt.Fprintf(&b, "%6d %s\n", c.begin, s)
		}
	}
	return b.String()
}
