// Toad deploys singleton containers on one host: it stops the running instance, starts the
// candidate, watches it, and promotes it or puts back what ran before.
//
// Usage:
//
//	toad serve
//	toad gateway --host NAME
//	toad status [SERVICE]
//	toad deploy SERVICE IMAGE
//	toad watch OPERATION
//	toad rollback SERVICE|OPERATION
//	toad log OPERATION
//	toad output OPERATION
//	toad history SERVICE
//	toad suspend SERVICE
//	toad resume SERVICE
//	toad reconcile SERVICE [OPERATION]
//	toad retire SERVICE
//	toad events [SERVICE]
//	toad audit verify [SERVICE]
//	toad token issue SERVICE | list [SERVICE] | revoke TOKEN
//	toad check DIR
//	toad doctor
//	toad fsck [--restore FILE]
//	toad backup > FILE
//	toad restore < FILE
//	toad version
//
// `serve` is the server: one on a host, in its own container. `gateway`, in another one, leads from a
// socket of the public web server to the read-only page. `check` judges a directory of
// enrollments without a host, `doctor` the host. The other commands speak to the server over its administration
// socket, /data/run/toad.sock unless --socket names another. `fsck`, `audit` and `backup` work on
// the data directory themselves when no server runs, `restore` always does.
//
// Whoever has a token reaches the server with --server URL instead: the token is in TOAD_TOKEN or in the
// file that --token-file names, and never on the command line. It is for one service, and does of
// `status`, `deploy`, `watch`, `rollback`, `log`, `history`, `events` and `reconcile` what its verbs allow.
// `token` issues, lists and revokes them, over the socket alone; a token is printed once.
//
// `fsck` reads every record, says what is wrong with which file, and exits 0 or 1. With --restore it
// puts one service.json or tokens.json back from its predecessor. Whatever is restored, by name or from a backup, never
// undoes a generation, an accepted operation or a promotion: every request made before is stale then, and
// what the evidence contradicts is refused.
//
// IMAGE is the enrolled repository and a digest: registry.example.org/apps/hello@sha256:….
// `deploy` follows its operation to the end unless --no-wait is given. Ctrl-C ends the watching and
// never the operation; `watch` takes it up again. A connection that is lost is tried for two
// minutes, so that Toad may restart in between. A request is sent again only under the key it was
// first sent with, and Toad accepts a key once: --key gives it again by hand.
//
// `rollback SERVICE` looks at the service once. An operation under way is asked to end; with none
// under way the retained revision is deployed again. With --expect or --key it is always the
// latter: who repeats a request must not end the operation that it began. `rollback OPERATION` asks
// that operation to end. An argument that could be either is an operation if there is one.
//
// `deploy --dry-run` says what a deployment would meet and change, and changes nothing. `suspend` stops a
// service and keeps it down over reboots until `resume`; `retire` ends one whose enrollment is gone, and
// keeps its records. `reconcile` acknowledges an operation that went wrong, where the enrollment demands
// it before the next deployment. These four may be repeated: what is done already stays as it is.
//
// Answers go to standard output, everything else to standard error. With --json standard output is
// one document as the API gives it: the final operation, or the problem of a refused request.
// Flags may stand before or behind the arguments, and every flag can be set by a variable: --socket
// by TOAD_SOCKET, --no-wait by TOAD_NO_WAIT.
//
// Exit status:
//
//	0    promoted, or done
//	1    the request, also one of a dry run, was refused or failed
//	2    usage
//	3    the operation failed
//	4    the operation was rolled back
//	5    the server is out of reach
//	130  interrupted
//
// `rollback` exits 0 when it ended as asked: the operation under way rolled back or cancelled, or the
// retained revision promoted.
package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/peterbourgon/ff/v3"
	"github.com/peterbourgon/ff/v3/ffcli"
)

func main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}

// run is one whole command line; its result is the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once

	// Package flag prints the help after every mistake: it is shown only when asked for.
	var help bytes.Buffer
	root := newRoot(stdout, stderr)
	var quiet func(c *ffcli.Command)
	quiet = func(c *ffcli.Command) {
		c.FlagSet.SetOutput(&help)
		c.UsageFunc = usageText
		for _, sub := range c.Subcommands {
			quiet(sub)
		}
	}
	quiet(root)
	err := root.Parse(permute(root, args))
	switch {
	case err == nil:
		err = root.Run(ctx)
	case errors.Is(err, flag.ErrHelp):
		io.WriteString(stdout, strings.TrimRight(help.String(), "\n")+"\n")
		return 0
	default:
		text := strings.TrimPrefix(err.Error(), "error parsing commandline arguments: ")
		text = strings.TrimPrefix(text, "error parsing environment variables: ")
		hint := "toad -h lists the commands"
		for _, c := range root.Subcommands {
			if len(args) > 0 && args[0] == c.Name {
				hint = "toad " + c.Name + " -h lists the flags"
			}
		}
		err = usageError(text, hint)
	}
	var e *commandError
	switch {
	case err == nil:
		return 0
	case !errors.As(err, &e):
		e = &commandError{status: exitRefused, text: err.Error()}
	}
	if e.text != "" {
		printLine(stderr, "toad: %s", e.text)
	}
	if e.hint != "" {
		printLine(stderr, "hint: %s", e.hint)
	}
	return e.status
}

// newRoot builds the command tree, every flag at its default.
func newRoot(stdout, stderr io.Writer) *ffcli.Command {
	return &ffcli.Command{
		Name:       "toad",
		ShortUsage: "toad COMMAND [ARGUMENTS] [FLAGS]",
		ShortHelp:  "deploy singleton containers on one host",
		LongHelp: "Every flag can be set by a variable: --socket by TOAD_SOCKET.\n" +
			"Exit status: 0 promoted or done, 1 refused, 2 usage, 3 operation failed,\n" +
			"4 rolled back, 5 server out of reach, 130 interrupted.",
		FlagSet: newFlags("toad"),
		Subcommands: []*ffcli.Command{
			serveCmd(stdout, stderr),
			gatewayCmd(stdout, stderr),
			statusCmd(stdout, stderr),
			deployCmd(stdout, stderr),
			watchCmd(stdout, stderr),
			rollbackCmd(stdout, stderr),
			logCmd(stdout, stderr),
			outputCmd(stdout, stderr),
			historyCmd(stdout, stderr),
			suspendCmd(stdout, stderr),
			resumeCmd(stdout, stderr),
			reconcileCmd(stdout, stderr),
			retireCmd(stdout, stderr),
			eventsCmd(stdout, stderr),
			auditCmd(stdout, stderr),
			tokenCmd(stdout, stderr),
			checkCmd(stdout),
			doctorCmd(stdout),
			fsckCmd(stdout, stderr),
			backupCmd(stdout, stderr),
			restoreCmd(os.Stdin, stdout),
			versionCmd(stdout),
		},
		Exec: func(_ context.Context, args []string) error {
			if len(args) == 0 {
				return usageError("no command given", "toad -h lists the commands")
			}
			return usageError(fmt.Sprintf("unknown command: %s", args[0]), "toad -h lists the commands")
		},
	}
}

func newFlags(name string) *flag.FlagSet { return flag.NewFlagSet(name, flag.ContinueOnError) }

// newCommand makes the command that its flags are named after, as in "token issue". usage names its
// arguments, as wantArgs takes them, and then the flags that it cannot go without. The arguments are
// checked before exec is given them.
func newCommand(fs *flag.FlagSet, usage, short, long string, exec func(ctx context.Context, args []string) error) *ffcli.Command {
	path := strings.Fields(fs.Name())
	names, _, _ := strings.Cut(usage, "--")
	return &ffcli.Command{
		Name:       path[len(path)-1],
		ShortUsage: strings.Join(strings.Fields("toad "+fs.Name()+" "+usage+" [FLAGS]"), " "),
		ShortHelp:  short,
		LongHelp:   long,
		FlagSet:    fs,
		Options:    []ff.Option{ff.WithEnvVarPrefix("TOAD")},
		Exec: func(ctx context.Context, args []string) error {
			if err := wantArgs(fs.Name(), args, strings.Fields(names)...); err != nil {
				return err
			}
			return exec(ctx, args)
		},
	}
}

// permute moves the flags among a command's arguments before them: package flag stops at the first
// argument, and `toad deploy hello IMAGE --no-wait` is what everybody types.
func permute(c *ffcli.Command, args []string) []string {
	for _, sub := range c.Subcommands {
		if len(args) > 0 && args[0] == sub.Name {
			return append([]string{sub.Name}, permute(sub, args[1:])...)
		}
	}
	if len(c.Subcommands) > 0 {
		return args
	}
	var flags, rest []string
	for i := 0; i < len(args); i++ {
		if args[i] == "--" {
			rest = append(rest, args[i+1:]...)
			break
		}
		if len(args[i]) < 2 || args[i][0] != '-' {
			rest = append(rest, args[i])
			continue
		}
		flags = append(flags, args[i])
		name := strings.TrimPrefix(args[i][1:], "-")
		f := c.FlagSet.Lookup(name) // nil with "=value" in it, and when unknown
		if f == nil || isBool(f) {
			continue
		}
		if i++; i == len(args) {
			return flags // its value is missing, which package flag says
		}
		flags = append(flags, args[i])
	}
	return append(append(flags, "--"), rest...)
}

func isBool(f *flag.Flag) bool {
	b, ok := f.Value.(interface{ IsBoolFlag() bool })
	return ok && b.IsBoolFlag()
}

// usageText is the help of one command, with flags spelled as everybody types them.
func usageText(c *ffcli.Command) string {
	var b strings.Builder
	fmt.Fprintf(&b, "usage: %s\n\n%s\n", c.ShortUsage, c.ShortHelp)
	if c.LongHelp != "" {
		fmt.Fprintf(&b, "%s\n", c.LongHelp)
	}
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	if len(c.Subcommands) > 0 {
		fmt.Fprintf(w, "\ncommands:\n")
	}
	for _, sub := range c.Subcommands {
		fmt.Fprintf(w, "  %s\t%s\n", sub.Name, sub.ShortHelp)
	}
	heading := "\nflags:\n"
	c.FlagSet.VisitAll(func(f *flag.Flag) {
		value, text := flag.UnquoteUsage(f)
		name := strings.TrimRight("--"+f.Name+" "+strings.ToUpper(value), " ")
		if len(f.Name) == 1 {
			name = "-" + f.Name
		}
		if f.DefValue != "" && !isBool(f) {
			text += " (default " + f.DefValue + ")"
		}
		fmt.Fprintf(w, "%s  %s\t%s\n", heading, name, text)
		heading = ""
	})
	w.Flush()
	return b.String()
}

// reservedNames are the units and containers of the host's own that no service may claim.
const reservedNames = "toad,toad-gateway,caddy,zot,luci,secrets"

// serveConfig is where the server finds what it works with.
type serveConfig struct {
	bus        string   // D-Bus address of the systemd user manager
	podman     string   // URL of Podman's API
	quadlets   string   // directory the units are written to
	data       string   // directory of the records; the socket is run/toad.sock in it
	enrollment string   // directory of the enrollments, read-only
	listen     string   // TCP address for the holders of tokens; "": none
	webListen  string   // TCP address of the page, for the gateway; "": none
	authFile   string   // credentials for the registry
	caFile     string   // certificates the registry is trusted by
	plainHTTP  []string // registries spoken to without TLS
	reserved   []string // names no service may claim

	watchdog time.Duration // a third of it apart systemd is told that Toad lives; 0: never
}

func serveCmd(stdout, stderr io.Writer) *ffcli.Command {
	var cfg serveConfig
	fs := newFlags("serve")
	fs.StringVar(&cfg.bus, "bus", "unix:path=/run/toad/bus", "`address` of the systemd user manager's bus")
	fs.StringVar(&cfg.podman, "podman", "unix:///run/toad/podman/podman.sock", "`URL` of Podman's API")
	fs.StringVar(&cfg.quadlets, "quadlets", "/quadlet", "`directory` the units are written to")
	fs.StringVar(&cfg.data, "data", "/data", "`directory` of the records and of the socket run/toad.sock")
	fs.StringVar(&cfg.enrollment, "enrollment", "/enrollment", "`directory` of the enrollments")
	fs.StringVar(&cfg.listen, "listen", ":8440", "TCP `address` for the holders of tokens; empty: none")
	fs.StringVar(&cfg.webListen, "web-listen", ":8441", "TCP `address` of the page, for the gateway on the private network; empty: none")
	fs.StringVar(&cfg.authFile, "auth-file", "/etc/toad/auth.json", "`file` with the registry's credentials")
	fs.StringVar(&cfg.caFile, "ca-file", "/etc/toad/ca.pem", "`file` with the certificates that the registry is trusted by")
	fs.Func("plain-http", "registry `host` that is spoken to without TLS; repeatable", func(s string) error {
		cfg.plainHTTP = append(cfg.plainHTTP, splitNames(s)...)
		return nil
	})
	reserved := fs.String("reserved", reservedNames, "`names` of units and containers that no service may claim")
	watchdog := watchdogFlag(fs, &cfg.watchdog)
	return newCommand(fs, "", "run the server", "",
		func(ctx context.Context, args []string) error {
			if err := watchdog(); err != nil {
				return err
			}
			cfg.reserved = splitNames(*reserved)
			return serve(ctx, cfg, newLog(stdout, stderr))
		})
}

// watchdogFlag adds the flag of whoever a unit watches; what it returns judges the value.
func watchdogFlag(fs *flag.FlagSet, period *time.Duration) func() error {
	fs.DurationVar(period, "watchdog", 0, "`period` in which systemd wants a sign of life, the unit's WatchdogSec=; 0: none")
	return func() error {
		if *period != 0 && *period < time.Second {
			return usageError(fmt.Sprintf("--watchdog %v: want at least 1s", *period), "give it what WatchdogSec= in the unit says")
		}
		return nil
	}
}

func gatewayCmd(stdout, stderr io.Writer) *ffcli.Command {
	var cfg gatewayConfig
	fs := newFlags("gateway")
	fs.StringVar(&cfg.socket, "socket", "/run/toad-web/gateway.sock", "Unix `socket` to listen on, shared with the public web server")
	fs.StringVar(&cfg.host, "host", "", "the one host `name` that is answered to, as browsers send it")
	fs.StringVar(&cfg.upstream, "upstream", "toad:8441", "`address` of the page on the private network")
	fs.StringVar(&cfg.secretFile, "secret-file", "/run/toad-gateway/secret", "`file` with the credential that toad serve made")
	watchdog := watchdogFlag(fs, &cfg.watchdog)
	return newCommand(fs, "--host NAME", "lead from the public web server's socket to the read-only page", "",
		func(ctx context.Context, args []string) error {
			if err := watchdog(); err != nil {
				return err
			}
			if cfg.host == "" {
				return usageError("--host is missing", "it is the name that browsers know the page by")
			}
			return gateway(ctx, cfg, newLog(stdout, stderr))
		})
}

func checkCmd(stdout io.Writer) *ffcli.Command {
	var opts enrollOptions
	fs := newFlags("check")
	fs.StringVar(&opts.quadlets, "quadlets", "", "`directory` of the host's Quadlets, to check networks against")
	reserved := fs.String("reserved", reservedNames, "`names` of units and containers that no service may claim")
	return newCommand(fs, "DIR", "validate a directory of enrollments without a host", "",
		func(_ context.Context, args []string) error {
			opts.reserved = splitNames(*reserved)
			if !checkDirectory(stdout, args[0], opts) {
				return &commandError{status: exitRefused} // checkDirectory has said why
			}
			return nil
		})
}

// version is set by the release build: -ldflags "-X main.version=v1.2.3".
var version string

// buildVersion is the release, or what the module system knows of this build.
func buildVersion() wireVersion {
	v := wireVersion{Version: version, Go: runtime.Version()}
	if info, ok := debug.ReadBuildInfo(); ok && v.Version == "" {
		v.Version = info.Main.Version
	}
	v.Version = cmp.Or(v.Version, "unknown")
	return v
}

func versionCmd(stdout io.Writer) *ffcli.Command {
	cmd := newCommand(newFlags("version"), "", "print this binary's version", "",
		func(context.Context, []string) error {
			v := buildVersion()
			printLine(stdout, "toad %s (%s)", v.Version, v.Go)
			return nil
		})
	cmd.ShortUsage = "toad version" // it has no flags
	return cmd
}

// newLog logs for the journal as JSON, and for a person as text. An error goes to standard error, what is
// less to standard output: Podman's conmon gives them the priorities err and info, and passes a "<3>" at
// the head of a line on as text (2.1.12).
func newLog(stdout, stderr io.Writer) *slog.Logger {
	if isTerminal(stderr) {
		return slog.New(slog.NewTextHandler(stderr, nil))
	}
	return slog.New(byLevel{slog.NewJSONHandler(stdout, nil), slog.NewJSONHandler(stderr, nil)})
}

// byLevel hands errors to one handler and the rest to another.
type byLevel struct{ rest, errors slog.Handler }

func (h byLevel) Enabled(ctx context.Context, l slog.Level) bool { return h.rest.Enabled(ctx, l) }

func (h byLevel) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelError {
		return h.errors.Handle(ctx, r)
	}
	return h.rest.Handle(ctx, r)
}

func (h byLevel) WithAttrs(a []slog.Attr) slog.Handler {
	return byLevel{h.rest.WithAttrs(a), h.errors.WithAttrs(a)}
}

func (h byLevel) WithGroup(name string) slog.Handler {
	return byLevel{h.rest.WithGroup(name), h.errors.WithGroup(name)}
}

// splitNames splits a comma-separated list; "" is the empty one.
func splitNames(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })
}
