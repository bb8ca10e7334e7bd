package main

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// deafSocket is a socket that takes connections and never says a word.
func deafSocket(t *testing.T, path string) {
	t.Helper()
	ln, err := net.Listen("unix", path)
	must(t, err)
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
		}
	}()
}

// systemd hears READY=1 and then a sign of life at least each period, also while neither the manager's bus
// nor Podman answers anything: a restart would help neither.
func TestWatchdogWhileTheHostHangs(t *testing.T) {
	dir, err := os.MkdirTemp("", "wd") // the paths of sockets have to be short
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, sub := range []string{"data", "quadlets", "enrollment"} {
		must(t, os.Mkdir(filepath.Join(dir, sub), 0o700))
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	deafSocket(t, at("bus"))
	deafSocket(t, at("podman"))
	said, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: at("notify"), Net: "unixgram"})
	must(t, err)
	defer said.Close()
	t.Setenv("NOTIFY_SOCKET", at("notify"))

	const period = 2 * time.Second
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- serve(ctx, serveConfig{bus: "unix:path=" + at("bus"), podman: "unix://" + at("podman"), quadlets: at("quadlets"),
			data: at("data"), enrollment: at("enrollment"), watchdog: period}, slog.New(slog.NewTextHandler(testWriter{t}, nil)))
	}()
	read := func() string {
		b := make([]byte, 256)
		must(t, said.SetReadDeadline(time.Now().Add(10*period)))
		n, err := said.Read(b)
		must(t, err)
		return string(b[:n])
	}
	if got := read(); got != "READY=1" {
		t.Fatalf("it said %q first, want READY=1", got)
	}
	// The manager is looked at each five seconds: this is longer.
	for begun, last := time.Now(), time.Now(); time.Since(begun) < 6*time.Second; last = time.Now() {
		if got := read(); got != "WATCHDOG=1" || time.Since(last) > period {
			t.Fatalf("it said %q after %s, want WATCHDOG=1 within %s", got, time.Since(last), period)
		}
	}
	cancel()
	for got := read(); got != "STOPPING=1"; got = read() {
		if got != "WATCHDOG=1" {
			t.Fatalf("it said %q before STOPPING=1", got)
		}
	}
	must(t, <-ended)
}
