// Tapp is the workload that the tests deploy: a small static HTTP server which
// misbehaves as its environment says.
//
//	GET /              VERSION
//	GET /ready         200 "ok VERSION", or 503 "not ready"
//	GET /unready       /ready answers 503 from now on
//	GET /ready-again   and 200 again
//	GET /exit?code=N   exit with status N (0 when left out)
//
// Environment:
//
//	VERSION=text          what it calls itself (default "0")
//	PORT=n                listens on this port (default 8080)
//	READY_AFTER=duration  not ready before this long after its start
//	READY_FOR=duration    ready this long, then not ready for good
//	NEVER_READY=1         never ready, whatever else is asked
//	UNREADY_FILE=path     not ready while that file is there, on a volume
//	SLOW=duration         /ready answers this late
//	EXIT_AFTER=duration   exits by itself, with EXIT_CODE (default 1)
//	EXIT_ONCE=duration    the same, but only if the file MARKER is not there;
//	                      makes it first: only the first start of all exits
//	MARKER=path           that file, on a volume that outlives the container
//	CRASH=1               prints two lines to stdout and one to stderr and
//	                      exits at once, with EXIT_CODE
//	IGNORE_TERM=1         SIGTERM does nothing (otherwise: exit 0 at once)
//	HANG=path             reads this file once it listens, whatever comes of it
//	REDIRECT=url          /ready answers 302 to url
//	STALE=1, VIA=1, XCACHE=1
//	                      /ready answers as a cache would: with Age: 60,
//	                      Via: 1.1 cache, X-Cache: HIT
//
// "tapp poll URL" is the other side: a client that asks every 5 ms, on a new
// connection each time, until its standard input ends. Then it prints the
// longest time between two answers of 200 in a row, in milliseconds.
//
// "tapp wait DURATION" does nothing for that long and ends with status 0: a slow
// health check.
//
// Durations are Go's: "1500ms", "3s". A value that does not parse is fatal
// (exit status 2), so that a test with a slip in it does not pass by luck.
package main

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) == 3 && os.Args[1] == "poll" {
		poll(os.Args[2])
		return
	}
	if len(os.Args) == 3 && os.Args[1] == "wait" {
		d, err := time.ParseDuration(os.Args[2])
		if err != nil {
			fatal("wait: %v", err)
		}
		time.Sleep(d)
		return
	}
	start := time.Now()
	version := text("VERSION", "0")
	code := number("EXIT_CODE", 1)

	if on("CRASH") {
		fmt.Println("tapp", version, "starting")
		fmt.Println("tapp", version, "crashing with", code)
		fmt.Fprintln(os.Stderr, "tapp: CRASH is set")
		os.Exit(code)
	}

	// As PID 1 of its container a process without a handler ignores SIGTERM
	// anyway; the other way round needs saying.
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	go func() {
		for range term {
			if on("IGNORE_TERM") {
				fmt.Println("tapp", version, "ignores SIGTERM")
				continue
			}
			fmt.Println("tapp", version, "terminated")
			os.Exit(0)
		}
	}()

	if d := duration("EXIT_AFTER"); d > 0 {
		exitAfter(d, code)
	}
	if d := duration("EXIT_ONCE"); d > 0 {
		f, err := os.OpenFile(os.Getenv("MARKER"), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
		switch {
		case err == nil:
			f.Close()
			exitAfter(d, code)
		case !os.IsExist(err):
			fatal("MARKER: %v", err)
		}
	}

	var unready atomic.Bool
	readyAfter, readyFor, slow := duration("READY_AFTER"), duration("READY_FOR"), duration("SLOW")
	ready := func() bool {
		up := time.Since(start)
		if f := os.Getenv("UNREADY_FILE"); f != "" {
			if _, err := os.Stat(f); err == nil {
				return false
			}
		}
		return !on("NEVER_READY") && !unready.Load() && up >= readyAfter &&
			(readyFor == 0 || up < readyAfter+readyFor)
	}

	http.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, version)
	})
	http.HandleFunc("GET /ready", func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(slow)
		h := w.Header()
		if on("STALE") {
			h.Set("Age", "60")
		}
		if on("VIA") {
			h.Set("Via", "1.1 cache")
		}
		if on("XCACHE") {
			h.Set("X-Cache", "HIT")
		}
		switch url := os.Getenv("REDIRECT"); {
		case url != "":
			http.Redirect(w, r, url, http.StatusFound)
		case ready():
			fmt.Fprintln(w, "ok", version)
		default:
			http.Error(w, "not ready", http.StatusServiceUnavailable)
		}
	})
	http.HandleFunc("GET /unready", func(w http.ResponseWriter, r *http.Request) {
		unready.Store(true)
		fmt.Fprintln(w, "not ready from now on")
	})
	http.HandleFunc("GET /ready-again", func(w http.ResponseWriter, r *http.Request) {
		unready.Store(false)
		fmt.Fprintln(w, "ready again")
	})
	http.HandleFunc("GET /exit", func(w http.ResponseWriter, r *http.Request) {
		code, _ := strconv.Atoi(r.FormValue("code"))
		fmt.Println("tapp", version, "asked to exit with", code)
		os.Exit(code)
	})

	if path := os.Getenv("HANG"); path != "" {
		go func() {
			_, err := os.ReadFile(path)
			fmt.Println("tapp", version, "has read", path, err)
		}()
	}

	addr := ":" + strconv.Itoa(number("PORT", 8080))
	fmt.Println("tapp", version, "listening on", addr)
	fatal("%v", http.ListenAndServe(addr, nil))
}

func poll(url string) {
	end := make(chan struct{})
	go func() {
		io.Copy(io.Discard, os.Stdin)
		close(end)
	}()
	client := &http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	var last time.Time
	var longest time.Duration
	for tick := time.NewTicker(5 * time.Millisecond); ; {
		select {
		case <-end:
			fmt.Println(longest.Milliseconds())
			return
		case <-tick.C:
		}
		resp, err := client.Get(url)
		if err != nil {
			continue
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			continue
		}
		now := time.Now()
		if !last.IsZero() {
			longest = max(longest, now.Sub(last))
		}
		last = now
	}
}

func exitAfter(d time.Duration, code int) {
	time.AfterFunc(d, func() {
		fmt.Println("tapp exits with", code, "after", d)
		os.Exit(code)
	})
}

func on(name string) bool { return os.Getenv(name) == "1" }

func text(name, unset string) string {
	if s := os.Getenv(name); s != "" {
		return s
	}
	return unset
}

func number(name string, unset int) int {
	n, err := strconv.Atoi(text(name, strconv.Itoa(unset)))
	if err != nil {
		fatal("%s: %v", name, err)
	}
	return n
}

func duration(name string) time.Duration {
	d, err := time.ParseDuration(text(name, "0s"))
	if err != nil {
		fatal("%s: %v", name, err)
	}
	return d
}

func fatal(format string, args ...any) {
	log.Printf("tapp: "+format, args...)
	os.Exit(2)
}
