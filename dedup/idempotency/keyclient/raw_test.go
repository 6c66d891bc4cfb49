package keyclient_test

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// rawBank acts on each whole POST that arrives, whatever its key, and does not answer the first
// one: it closes the connection, or resets the stream. It has no server of net/http below it, which
// answers in better order.
type rawBank struct {
	url   string
	serve func(*rawBank, net.Conn) error

	mu    sync.Mutex
	acted int
	empty int // of these, so many had no body
	conns []net.Conn
	group sync.WaitGroup
}

// newRawBank listens on loopback until the test ends, and returns a base that sends to it. HTTP/2
// has TLS.
func newRawBank(t *testing.T, serve func(*rawBank, net.Conn) error, overHTTP2 bool) (*rawBank, *http.Transport) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	b, base := &rawBank{url: "http://" + listener.Addr().String(), serve: serve}, &http.Transport{}
	if overHTTP2 {
		lender := httptest.NewTLSServer(nil) // of its certificate
		defer lender.Close()
		base = lender.Client().Transport.(*http.Transport).Clone()
		base.ForceAttemptHTTP2 = true
		b.url = "https://" + listener.Addr().String()
		listener = tls.NewListener(listener, &tls.Config{Certificates: lender.TLS.Certificates, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13})
	}
	t.Cleanup(base.CloseIdleConnections)
	b.group.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			b.mu.Lock()
			b.conns = append(b.conns, conn)
			b.mu.Unlock()
			b.group.Go(func() {
				_ = b.serve(b, conn) // it ends where the client goes
				_ = conn.Close()
			})
		}
	})
	t.Cleanup(func() {
		assert.NoError(t, listener.Close())
		b.mu.Lock()
		for _, conn := range b.conns {
			_ = conn.Close()
		}
		b.mu.Unlock()
		b.group.Wait()
	})
	return b, base
}

// act reports whether it is the first time.
func (b *rawBank) act(body int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.acted++
	if body == 0 {
		b.empty++
	}
	return b.acted == 1
}

func (b *rawBank) acts() (all, empty int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.acted, b.empty
}

// http1 closes the connection at the first POST, which must not be its first request, since a
// client knows what that means.
func http1(b *rawBank, conn net.Conn) error {
	reader := bufio.NewReader(conn)
	for {
		r, err := http.ReadRequest(reader)
		if err != nil {
			return err
		}
		body, err := io.Copy(io.Discard, r.Body)
		if err != nil || (r.Method == http.MethodPost && b.act(body)) {
			return err
		}
		if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"); err != nil {
			return err
		}
	}
}

// Frames of HTTP/2 (RFC 9113, 6), and what is in them.
const (
	dataFrame, headersFrame, resetFrame, settingsFrame, goAwayFrame = 0, 1, 3, 4, 7

	endStream, ack, endHeaders      = 1, 1, 4
	protocolError, refused          = 1, 7
	preface                         = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	status200                  byte = 0x88 // in HPACK's static table
)

func frame(conn net.Conn, kind, flags byte, stream uint32, payload ...byte) error {
	head := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
	head = binary.BigEndian.AppendUint32(append(head, flags), stream)
	_, err := conn.Write(append(head, payload...))
	return err
}

// http2 ends the stream of the first POST, each request is taken for one, by RST_STREAM with a
// code.
func http2(code uint32) func(*rawBank, net.Conn) error {
	return func(b *rawBank, conn net.Conn) error {
		return serveHTTP2(b, conn, func(stream uint32) error {
			return frame(conn, resetFrame, 0, stream, binary.BigEndian.AppendUint32(nil, code)...)
		})
	}
}

// http2GoAway says that it did not look at the request.
func http2GoAway(b *rawBank, conn net.Conn) error {
	return serveHTTP2(b, conn, func(uint32) error { return frame(conn, goAwayFrame, 0, 0, make([]byte, 8)...) })
}

func serveHTTP2(b *rawBank, conn net.Conn, refuse func(stream uint32) error) error {
	reader := bufio.NewReader(conn)
	if _, err := reader.Discard(len(preface)); err != nil {
		return err
	}
	if err := frame(conn, settingsFrame, 0, 0); err != nil {
		return err
	}
	bodies := map[uint32]int64{}
	for {
		var head [9]byte
		if _, err := io.ReadFull(reader, head[:]); err != nil {
			return err
		}
		length := binary.BigEndian.Uint32(head[:4]) >> 8
		if _, err := reader.Discard(int(length)); err != nil {
			return err
		}
		kind, flags, stream := head[3], head[4], binary.BigEndian.Uint32(head[5:])
		var err error
		switch {
		case kind == settingsFrame && flags&ack == 0:
			err = frame(conn, settingsFrame, ack, 0)
		case kind == dataFrame:
			bodies[stream] += int64(length)
		}
		if (kind == dataFrame || kind == headersFrame) && flags&endStream != 0 {
			if b.act(bodies[stream]) {
				err = refuse(stream)
			} else {
				err = frame(conn, headersFrame, endHeaders|endStream, stream, status200)
			}
		}
		if err != nil {
			return err
		}
	}
}
