// doctor.go looks at what Toad needs of a host and says what is missing, before a deployment finds out. It
// needs no server, and changes nothing.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"
)

type wireDoctor struct {
	OK     bool        `json:"ok"` // no check found a problem
	Checks []wireCheck `json:"checks"`
}

type doctorConfig struct {
	data, quadlets, enrollment, linger string
	reserved                           []string
}

// waitOnline is what Podman lets every Quadlet of a user wait for (podman-systemd.unit(5)). Once it failed,
// each start runs into its 90 seconds anew.
const waitOnline = "podman-user-wait-network-online.service"

// examine makes every check, each bounded in time, and goes on after one that found something.
func examine(ctx context.Context, u units, p *podman, cfg doctorConfig) wireDoctor {
	d := wireDoctor{OK: true}
	say := func(name, outcome, format string, args ...any) {
		d.Checks = append(d.Checks, wireCheck{Name: name, Outcome: outcome, Detail: fmt.Sprintf(format, args...)})
		d.OK = d.OK && outcome != "problem"
	}
	// No container can tell it: the wrapper asks logind.
	switch cfg.linger {
	case "yes":
		say("linger", "passed", "the user's services start at boot and outlive its sessions")
	case "no":
		say("linger", "problem", "the user's services end with its last session and do not start at boot: as root, loginctl enable-linger USER")
	default:
		say("linger", "unknown", "ask the host: loginctl show-user USER --property Linger")
	}

	if _, err := u.Incarnation(ctx); err != nil {
		say("systemd", "problem", "the user manager does not answer: %v: see systemctl --user status, and whether its bus is mounted", err)
	} else {
		say("systemd", "passed", "the user manager answers")
		for _, unit := range []struct{ name, want, remedy string }{
			{"toad.service", "active", "install toad.container, then systemctl --user daemon-reload and start toad.service; if it is there, journalctl --user -u toad.service"},
			{waitOnline, "", "every start of a Quadlet waits up to 90 s for the host's network-online.target: enable what reaches it, systemd-networkd-wait-online.service or NetworkManager-wait-online.service"},
		} {
			st, err := u.Unit(ctx, unit.name)
			switch {
			case err != nil:
				say(unit.name, "problem", "systemd does not tell its state: %v", err)
			case unit.want == "" && (st.ActiveState == "failed" || st.ActiveState == "activating"), unit.want != "" && st.ActiveState != unit.want:
				say(unit.name, "problem", "it is %s (%s): %s", st.ActiveState, st.LoadState, unit.remedy)
			default:
				say(unit.name, "passed", "it is %s", st.ActiveState)
			}
		}
	}

	var info struct {
		Host struct {
			Security struct{ Rootless bool }
		}
		Version struct{ Version string }
	}
	switch err := p.read(ctx, &info, "/info", nil); {
	case err != nil:
		say("podman", "problem", "its API does not answer: %v: systemctl --user enable --now podman.socket, and see that its directory is mounted", err)
	case !info.Host.Security.Rootless:
		say("podman", "problem", "version %s runs as root: give Toad the socket of its own user", info.Version.Version)
	default:
		say("podman", "passed", "version %s, rootless", info.Version.Version)
	}

	const readWrite = 4 | 2 | 1 // access(2): and to enter it
	for _, dir := range []struct {
		name, path string
		mode       uint32
	}{{"data", cfg.data, readWrite}, {"quadlets", cfg.quadlets, readWrite}, {"enrollment", cfg.enrollment, 4 | 1}} {
		if err := syscall.Access(dir.path, dir.mode); err != nil {
			say(dir.name, "problem", "%s: %v: it is to be there, of Toad's user, and writable but for the enrollment", dir.path, err)
		} else if dir.name != "enrollment" {
			say(dir.name, "passed", "%s can be written", dir.path)
		} else if !checkDirectory(io.Discard, dir.path, enrollOptions{quadlets: cfg.quadlets, reserved: cfg.reserved}) {
			say(dir.name, "problem", "an enrollment does not allow deployments, or there is none: toad check DIR says why")
		} else {
			say(dir.name, "passed", "every enrollment allows deployments")
		}
	}
	return d
}

func doctorCmd(stdout io.Writer) *ffcli.Command {
	fs := newFlags("doctor")
	var cfg doctorConfig
	bus := fs.String("bus", "unix:path=/run/toad/bus", "`address` of the systemd user manager's bus")
	api := fs.String("podman", "unix:///run/toad/podman/podman.sock", "`URL` of Podman's API")
	fs.StringVar(&cfg.data, "data", "/data", "`directory` of the records")
	fs.StringVar(&cfg.quadlets, "quadlets", "/quadlet", "`directory` the units are written to")
	fs.StringVar(&cfg.enrollment, "enrollment", "/enrollment", "`directory` of the enrollments")
	fs.StringVar(&cfg.linger, "linger", "", "`yes` or no, as logind says of the user; the wrapper on the host asks it")
	reserved := fs.String("reserved", reservedNames, "`names` of units and containers that no service may claim")
	c := &client{out: stdout}
	fs.BoolVar(&c.json, "json", false, "print the answer as JSON")
	return newCommand(fs, "", "see whether the host has what Toad needs", "",
		func(ctx context.Context, _ []string) error {
			cfg.reserved = splitNames(*reserved)
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			d := examine(ctx, newSystemd(*bus), newPodman(*api), cfg)
			raw, err := json.Marshal(d)
			if err != nil {
				return err
			}
			var lines []string
			for _, check := range d.Checks {
				lines = append(lines, check.Outcome+": "+check.Name+": "+check.Detail)
			}
			c.answer(raw, lines...)
			if !d.OK {
				return &commandError{status: exitRefused}
			}
			return nil
		})
}
