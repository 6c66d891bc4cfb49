package command

import (
	"errors"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
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
	pprof  string      // empty: off
	every  time.Duration
}

func (e *endpoints) addFlags(flags *pflag.FlagSet) {
	cli.AddOption(flags, "listen", "address", listenStandard, "address of /healthz, /readyz and /metrics, as host:port, or off", e.parseListen)
	e.listen = flags.Lookup("listen")
	cli.AddDuration(flags, &e.every, "metrics-interval", 15*time.Second, time.Second, 10*time.Minute, "pause between two reads of the database for /metrics")
	cli.AddOption(flags, "pprof-address", "address", "", "address of /debug/pprof/, as host:port with a loopback IP; default: off", e.parsePProf)
}

func (e *endpoints) parsePProf(text string) error {
	host, _, err := net.SplitHostPort(text)
	if err != nil || !net.ParseIP(host).IsLoopback() {
		return errors.New("want host:port with a loopback IP, such as 127.0.0.1:6060: profiles show internals")
	}
	e.pprof = text
	return nil
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
	if e.pprof != "" && e.addr == "" {
		return errors.New("--pprof-address with --listen off: want an address for both")
	}
	return nil
}

// loopback reports whether an address is only reachable from this machine.
func loopback(addr net.Addr) bool {
	tcp, ok := addr.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}
