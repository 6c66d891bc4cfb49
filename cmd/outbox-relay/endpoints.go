package main

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/monitor"
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
	pprof  bool
	token  monitor.Token
	every  time.Duration
}

func (e *endpoints) addFlags(flags *pflag.FlagSet) {
	cli.AddOption(flags, "listen", "address", listenStandard, "address of /healthz, /readyz and /metrics, as host:port, or off", e.parseListen)
	e.listen = flags.Lookup("listen")
	cli.AddDuration(flags, &e.every, "metrics-interval", 15*time.Second, time.Second, 10*time.Minute, "pause between two reads of the database for /metrics")
	cli.AddBool(flags, &e.pprof, "pprof", "also serve /debug/pprof/, with the token of --admin-token-file")
	cli.AddOption(flags, "admin-token-file", "file", "", fmt.Sprintf("file with the token that --pprof requires, at least %d bytes", monitor.TokenBytesMin), func(path string) (err error) {
		e.token, err = monitor.ReadToken(path)
		return err
	})
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

// Validate refuses flags that conflict.
func (e *endpoints) Validate() error {
	switch {
	case e.pprof && e.addr == "":
		return errors.New("--pprof with --listen off: want an address, or no --pprof")
	case e.pprof && !e.token.Set():
		return errors.New("--pprof without a token: want --admin-token-file")
	}
	return nil
}

// loopback reports whether an address is only reachable from this machine.
func loopback(addr net.Addr) bool {
	tcp, ok := addr.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}
