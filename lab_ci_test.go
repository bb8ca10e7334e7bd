package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// ciStep is infra/ci-deploy.sh on the lab's host, which reaches Toad's published port with a token.
type ciStep struct {
	*labService
	token, id string
}

func (s *labService) ciStep(verbs ...string) *ciStep {
	s.t.Helper()
	script, err := os.ReadFile("infra/ci-deploy.sh")
	must(s.t, err)
	s.write(s.t, "ci/"+s.name+".sh", string(script))
	var issued struct{ ID, Token string }
	if p := s.mustCall(s.t, "POST", "/v1/tokens", map[string]any{"service": s.name, "label": "ci", "verbs": verbs}, &issued); p != nil {
		s.t.Fatalf("issuing a token: %+v", p)
	}
	return &ciStep{s, issued.Token, issued.ID}
}

// command is the step for an image, as the run of that name.
func (c *ciStep) command(image, run string, env ...string) *exec.Cmd {
	cmd := c.lab.lab("exec", "setsid", "--wait", "sh", "-s")
	env = append([]string{"TOAD_TOKEN=" + c.token, "TOAD_SERVICE=" + c.name, "TOAD_IMAGE=" + image, "TOAD_RUN=" + run, "TOAD_PATIENCE=90", "REGISTRY_URL=http://registry.lab:5000"}, env...)
	// By standard input, as a CI hands it on: not by anybody's arguments.
	cmd.Stdin = strings.NewReader(fmt.Sprintf("echo $$ >ci/%s.pid\nexport %s\nexec sh ci/%s.sh\n", c.name, strings.Join(env, " "), c.name))
	return cmd
}

func (c *ciStep) run(image, run string, status int, words string, env ...string) {
	c.t.Helper()
	cmd := c.command(image, run, env...)
	out, _ := cmd.CombinedOutput()
	if got := cmd.ProcessState.ExitCode(); got != status || !strings.Contains(string(out), words) {
		c.t.Errorf("exit %d, want %d and %q:\n%s", got, status, words, out)
	}
	if strings.Contains(string(out), c.token) {
		c.t.Errorf("the token was printed:\n%s", out)
	}
}

// begin starts the step and waits until its operation is in probation.
func (c *ciStep) begin(image, run string) (cmd *exec.Cmd, out *strings.Builder, op wireOperation) {
	c.t.Helper()
	cmd, out = c.command(image, run), &strings.Builder{}
	cmd.Stdout, cmd.Stderr = out, out
	must(c.t, cmd.Start())
	c.eventually("the step has submitted", func() bool { return c.view().ActiveOperation != nil })
	return cmd, out, c.awaitState(c.view().ActiveOperation.ID, "probation")
}

// operations is how many operations the service ever had.
func (c *ciStep) operations() int {
	c.t.Helper()
	var list wireOperations
	c.mustCall(c.t, "GET", "/v1/services/"+c.name+"/operations?limit=200", nil, &list)
	return len(list.Operations)
}

func TestLabCIStepOutcomes(t *testing.T) {
	t.Parallel()
	c := theLab(t).enroll(t, "ci-outcomes").ciStep("read", "deploy")
	good, bad := c.image("VERSION=1"), c.image("VERSION=2", "NEVER_READY=1")

	repository, digest, _ := strings.Cut(good, "@")
	c.exec(t, fmt.Sprintf("jq --version >/dev/null && curl --version >/dev/null && curl -sfI -H 'Accept: application/vnd.oci.image.manifest.v1+json' http://registry.lab:5000/v2/apps/%s/manifests/%s", c.name, digest))
	c.run(repository, "1", 0, "promoted: "+c.name+" is at generation 1", "TOAD_DIGEST="+digest)
	c.run(good, "1", 0, "promoted: "+c.name+" is at generation 1")
	c.run(bad, "1", 1, "run 1 deployed "+good)
	c.run(bad, "2", 4, "rolled back: ")
	c.run(bad, "2", 4, "rolled back: ")
	c.run(repository+"@sha256:"+strings.Repeat("0", 64), "3", 3, "failed: fetch_failed: ")
	c.run(strings.Replace(good, c.name, "other", 1), "4", 1, "repository_not_allowed")
	if n := c.operations(); n != 3 {
		t.Errorf("%d operations, want 3", n)
	}
	c.expectRuns(good)
}

// TestLabCIStepBusyAndStale: another deployment is under way, and then was promoted between the look at the
// generation and the submission.
func TestLabCIStepBusyAndStale(t *testing.T) {
	t.Parallel()
	c := theLab(t).enroll(t, "ci-busy").ciStep("read", "deploy")
	first, second := c.image("VERSION=1"), c.image("VERSION=2")
	c.promote(first)
	op := c.submit(second)
	c.run(first, "1", 7, "busy: operation "+op.ID)
	c.expect(c.await(op.ID, nil), "promoted", "")

	// The step is held where it is by a curl that waits before it posts.
	c.write(t, "ci/"+c.name+"-bin/curl", "#!/bin/sh\ncase \" $* \" in *\" --data-binary \"*) touch ~/ci/"+c.name+".posts; while [ ! -e ~/ci/"+c.name+".go ]; do sleep 0.1; done ;; esac\nexec /usr/bin/curl \"$@\"\n")
	c.exec(t, "chmod +x ci/"+c.name+"-bin/curl; rm -f ci/"+c.name+".go ci/"+c.name+".posts")
	done := make(chan bool)
	go func() {
		defer close(done)
		c.run(first, "2", 6, "stale generation: somebody else deployed", `PATH=$HOME/ci/`+c.name+`-bin:$PATH`)
	}()
	c.eventually("the step is about to submit", func() bool { _, status := c.try("test", "-e", "ci/"+c.name+".posts"); return status == 0 })
	third := c.image("VERSION=3")
	c.promote(third)
	c.exec(t, "touch ci/"+c.name+".go")
	<-done
	c.expectRuns(third)
}

func TestLabCIStepTokenRevokedMeanwhile(t *testing.T) { // E10
	t.Parallel()
	c := theLab(t).enroll(t, "ci-revoked", func(s *labService) { s.en.Probation.StabilityWindow = duration(8 * time.Second) }).ciStep("read", "deploy")
	image := c.image("VERSION=1")
	cmd, out, op := c.begin(image, "1")
	var revoked any
	if p := c.mustCall(t, "DELETE", "/v1/tokens/"+c.id, nil, &revoked); p != nil {
		t.Fatalf("revoking: %+v", p)
	}
	_ = cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != 8 || !strings.Contains(out.String(), "it was revoked or has expired") {
		t.Errorf("exit %d:\n%s", got, out)
	}
	c.expect(c.await(op.ID, nil), "promoted", "") // what was accepted goes on
	c.run(image, "2", 8, "the token is not valid")
}

// TestLabCIStepLosesTheNetwork has the lab to itself: for everybody the published port is dead for a while.
func TestLabCIStepLosesTheNetwork(t *testing.T) {
	c := theLab(t).enroll(t, "ci-cut", func(s *labService) { s.en.Probation.StabilityWindow = duration(20 * time.Second) }).ciStep("read", "deploy")
	image := c.image("VERSION=1")
	// As the step asks: a status from the published port, 000 if it is dead.
	port := func() string {
		out, _ := c.try("curl", "--silent", "--max-time", "5", "--output", "/dev/null", "--write-out", "%{http_code}", "http://127.0.0.1:8440/v1/health")
		return out
	}
	cmd, out, op := c.begin(image, "1")
	if got := port(); got != "401" {
		t.Errorf("before the cut the port answers %q", got)
	}
	c.root(t, `nft add table inet cut && nft add chain inet cut out '{ type filter hook output priority 0; }' &&
		nft add rule inet cut out tcp dport 8440 reject with tcp reset && nft add rule inet cut out tcp sport 8440 reject with tcp reset`)
	defer c.root(t, "nft list table inet cut >/dev/null 2>&1 && nft delete table inet cut; true")
	if got := port(); got != "000" {
		t.Errorf("in the cut the port answers %q", got)
	}
	if st := c.operation(op.ID).State; st != "probation" {
		t.Errorf("the cut came too late: it is %s", st)
	}
	c.expect(c.await(op.ID, nil), "promoted", "")
	if got := port(); got != "000" {
		t.Errorf("at the end of the operation the port answers %q", got)
	}
	c.root(t, "nft delete table inet cut")
	// A question under way may come through after all, or be asked again: the end is told in both.
	if err := cmd.Wait(); err != nil || !strings.Contains(out.String(), "toad: promoted: ") {
		t.Errorf("%v:\n%s", err, out)
	}
	if n := c.operations(); n != 1 {
		t.Errorf("%d operations", n)
	}
}

func TestLabCIStepKilledAndRunAgain(t *testing.T) {
	t.Parallel()
	c := theLab(t).enroll(t, "ci-killed", func(s *labService) { s.en.Probation.StabilityWindow = duration(8 * time.Second) }).ciStep("read", "deploy")
	for i, image := range []string{c.image("VERSION=1"), c.image("VERSION=2")} {
		run := fmt.Sprint(i)
		cmd, out, op := c.begin(image, run)
		c.exec(t, "kill -KILL -$(cat ci/"+c.name+".pid)")
		if cmd.Wait() == nil {
			t.Errorf("it was not killed:\n%s", out)
		}
		if i == 0 { // once it is run again while the operation is under way, once after it
			c.run(image, run, 0, "operation "+op.ID)
		}
		c.expect(c.await(op.ID, nil), "promoted", "")
		c.run(image, run, 0, "operation "+op.ID)
		c.run(image, run, 0, fmt.Sprintf("promoted: %s is at generation %d", c.name, op.Generation))
	}
	if n := c.operations(); n != 2 {
		t.Errorf("%d operations", n)
	}
}
