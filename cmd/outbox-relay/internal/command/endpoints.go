package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// Settings of the endpoints.
const (
	// listenStandard is only reachable from this machine.
	listenStandard = "127.0.0.1:9464"
	listenOff      = "off"
)

// endpoints configures what "run" serves over HTTP.
type endpoints struct {
	listen *pflag.Flag // to know whether it was set
	addr   string      // empty: off
	every  time.Duration
}

func (e *endpoints) addFlags(flags *pflag.FlagSet) {
	cli.AddOption(flags, "listen", "address", listenStandard, "address of /healthz, /readyz and /metrics, as host:port, or off", e.parseListen)
	e.listen = flags.Lookup("listen")
	cli.AddDuration(flags, &e.every, "metrics-interval", 15*time.Second, time.Second, 10*time.Minute, "pause between two reads of the database for /metrics")
}

func (e *endpoints) parseListen(text string) error {
	if text == listenOff {
		e.addr = ""
		return nil
	}
	host, port, err := net.SplitHostPort(text)
	if err != nil || strings.ContainsAny(host, "/@ ") {
		return errors.New("want host:port, :port for every address of this machine, or off")
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return errors.New("want a port, 0 to 65535; 0 takes a free one")
	}
	e.addr = text
	return nil
}

// loopback reports whether an address is only reachable from this machine.
func loopback(addr net.Addr) bool {
	tcp, ok := addr.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}

// readyBytesMax is above the size of any answer of /readyz.
const readyBytesMax = 64 << 10

func newReady(*cli.Settings) *cobra.Command {
	var at endpoints
	var timeout time.Duration
	cmd := cli.Offline(&cobra.Command{
		Use:   "ready",
		Short: "Check that the relay on this machine is ready, as a container's health check",
		Long: `Request /readyz of the relay on this machine, or in this container, and print the answer. --listen is the relay's own,
so that one OUTBOX_LISTEN serves both. Exit status 1 if the relay is not ready, or does not answer. This checks the
replica, not the pipeline: see "outbox-relay status".`,
		Example: `  outbox-relay ready
  outbox-relay ready --listen :9464`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if at.addr == "" {
				return usageError{errors.New("--listen off: the relay does not listen; want its address")}
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return askReady(ctx, at.addr, cmd.OutOrStdout())
		},
	})
	cli.AddOption(cmd.Flags(), "listen", "address", listenStandard, "address of the relay's /readyz, as host:port", at.parseListen)
	cli.AddDuration(cmd.Flags(), &timeout, "timeout", 3*time.Second, 10*time.Millisecond, time.Minute, "time limit of the answer")
	return cmd
}

func askReady(ctx context.Context, address string, out io.Writer) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() { // every address, including localhost
		address = net.JoinHostPort("localhost", port)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/readyz", http.NoBody)
	if err != nil {
		return err
	}
	client := http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}} // a proxy would reach another machine
	response, err := client.Do(request)
	if err != nil {
		return fmt.Errorf("no relay answers at %s: %w", address, errors.Unwrap(err))
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(response.Body, readyBytesMax))
	if err != nil {
		return fmt.Errorf("read the answer of the relay at %s: %w", address, err)
	}
	if err := terminal.Say(out, "%s\n", strings.TrimSpace(string(text))); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return errUnhealthy
	}
	return nil
}
