package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
)

// axeVersion is the accessibility checker's, from the npm registry.
const axeVersion = "4.14.1"

// axe is the checker's script, kept in the user's cache.
var axe = sync.OnceValues(func() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	path := filepath.Join(cache, "toad-test", "axe-core-"+axeVersion+".js")
	if b, err := os.ReadFile(path); err == nil {
		return string(b), nil
	}
	dir, err := os.MkdirTemp("", "axe")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	cmd := exec.Command("npm", "pack", "--silent", "axe-core@"+axeVersion) // npm compares the archive with its digest
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("npm pack: %w\n%s", err, out)
	}
	f, err := os.Open(filepath.Join(dir, "axe-core-"+axeVersion+".tgz"))
	if err != nil {
		return "", err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return "", err
	}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err != nil {
			return "", err
		}
		if h.Name != "package/axe.min.js" {
			continue
		}
		b, err := io.ReadAll(r)
		if err != nil {
			return "", err
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return "", err
		}
		return string(b), writeFile(path, b)
	}
})

// browser is a Chromium without a window.
type browser struct {
	t   testing.TB
	ctx context.Context

	mu     sync.Mutex
	faults []string // what the console and the page's own security policy complained of
}

func newBrowser(t testing.TB, flags ...chromedp.ExecAllocatorOption) *browser {
	t.Helper()
	if testing.Short() {
		t.Skip("this test needs a browser: run without -short")
	}
	path := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if p, err := exec.LookPath(name); err == nil && path == "" {
			path = p
		}
	}
	if path == "" {
		t.Fatal("there is no Chromium on the PATH: apt-get install chromium")
	}
	// Root has no sandbox; nothing but Toad's own pages is opened.
	options := append(append([]chromedp.ExecAllocatorOption{}, chromedp.DefaultExecAllocatorOptions[:]...), chromedp.ExecPath(path), chromedp.NoSandbox)
	actx, cancel := chromedp.NewExecAllocator(context.Background(), append(options, flags...)...)
	t.Cleanup(cancel)
	ctx, cancel := chromedp.NewContext(actx)
	t.Cleanup(cancel)
	b := &browser{t: t, ctx: ctx}
	must(t, chromedp.Do(ctx)) // the browser lives as long as this context
	messages := chromedp.Console(ctx)
	go func() {
		for m, err := range messages {
			if err != nil {
				return
			}
			if m.Type == chromedp.ConsoleError || m.IsException() {
				b.mu.Lock()
				b.faults = append(b.faults, m.String()+" "+m.URL)
				b.mu.Unlock()
			}
		}
	}()
	return b
}

func (b *browser) run(steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, 2*time.Minute)
	defer cancel()
	must(b.t, chromedp.Do(ctx, steps...))
}

// result runs what has one.
func result[T any](b *browser, action chromedp.Action[T]) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, 2*time.Minute)
	defer cancel()
	v, err := chromedp.Run(ctx, action)
	must(b.t, err)
	return v
}

// as sets what the reader sees with.
func (b *browser) as(width, height int64, scheme string, script bool) {
	b.t.Helper()
	opts := []chromedp.EmulateViewportOption{}
	if width < 700 {
		opts = append(opts, chromedp.EmulateMobile, chromedp.EmulateTouch, chromedp.EmulateScale(2))
	}
	b.run(chromedp.EmulateViewport(width, height, opts...))
	_, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
	must(b.t, err)
	_, err = chromedp.Call(b.ctx, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: !script})
	must(b.t, err)
}

// shot saves the whole page as a picture with the test's output (go test -artifacts).
func (b *browser) shot(name string) {
	b.t.Helper()
	png := result(b, chromedp.FullScreenshot(100))
	must(b.t, os.WriteFile(filepath.Join(b.t.ArtifactDir(), name+".png"), png, 0o644))
}

// text is what a reader reads.
func (b *browser) text() string {
	b.t.Helper()
	return result(b, chromedp.Text(chromedp.CSS("body")))
}

// until waits until the page says it, by itself or by reloading.
func (b *browser) until(d time.Duration, what string, reload bool) string {
	b.t.Helper()
	return b.untilIn("body", d, what, reload)
}

// untilIn waits until that element of the page says it. One that is not there, or was just replaced, says nothing.
func (b *browser) untilIn(element string, d time.Duration, what string, reload bool) string {
	b.t.Helper()
	for end := time.Now().Add(d); ; time.Sleep(100 * time.Millisecond) { // the page tells nobody outside that it changed
		ctx, cancel := context.WithTimeout(b.ctx, 5*time.Second)
		s, err := chromedp.Run(ctx, chromedp.Text(chromedp.CSS(element)))
		cancel()
		if strings.Contains(s, what) {
			return s
		}
		if time.Now().After(end) {
			b.t.Fatalf("the page does not say %q in %s within %s (%v):\n%s", what, element, d, err, s)
		}
		if reload {
			b.run(chromedp.Reload())
		}
	}
}

// accessible demands that the checker finds nothing, and that nothing is wider than the window.
func (b *browser) accessible(what string) {
	b.t.Helper()
	script, err := axe()
	if err != nil {
		b.t.Fatal(err)
	}
	var found struct {
		Violations []struct {
			ID, Help string
			Nodes    []struct{ HTML, FailureSummary string }
		}
		Passes []struct{ ID string }
	}
	raw := result(b, chromedp.Evaluate[string](script+`;axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}).then(r => JSON.stringify({violations: r.violations, passes: r.passes}))`, chromedp.EvalAwaitPromise))
	must(b.t, json.Unmarshal([]byte(raw), &found))
	if len(found.Passes) < 10 {
		b.t.Errorf("%s: the checker checked only %d rules", what, len(found.Passes))
	}
	for _, v := range found.Violations {
		for _, n := range v.Nodes {
			b.t.Errorf("%s: %s (%s): %s\n%s", what, v.ID, v.Help, n.HTML, n.FailureSummary)
		}
	}
	if result(b, chromedp.Evaluate[bool](`document.documentElement.scrollWidth > document.documentElement.clientWidth`)) {
		b.t.Errorf("%s: the page is wider than the window", what)
	}
}

// clean demands that the browser complained of nothing.
func (b *browser) clean() {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range b.faults {
		b.t.Error(f)
	}
}
