package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// settingsFileBytesMax is far above any password, token, key or list of authorities.
const settingsFileBytesMax = 4 << 20

// readSettingsFile reads a file that a flag names. Its errors quote neither the file nor its name:
// the user may have given the secret instead of the name.
func readSettingsFile(path string) ([]byte, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errors.New("want a file that exists")
	case errors.Is(err, fs.ErrPermission):
		return nil, errors.New("want a file that this user may read")
	case err != nil:
		return nil, errors.New("want a file that can be read")
	case !info.Mode().IsRegular():
		// A pipe would be empty for the next connection.
		return nil, errors.New("want a regular file: it is read again later")
	}
	file, err := os.Open(path) //nolint:gosec // the operator names it
	if err != nil {
		return nil, errors.New("want a file that this user may read")
	}
	defer func() { _ = file.Close() }() // it was only read
	text, err := io.ReadAll(io.LimitReader(file, settingsFileBytesMax+1))
	switch {
	case err != nil:
		return nil, errors.New("want a file that can be read")
	case len(text) > settingsFileBytesMax:
		return nil, fmt.Errorf("want a file of at most %d bytes", settingsFileBytesMax)
	case len(bytes.TrimSpace(text)) == 0:
		return nil, errors.New("the file is empty")
	}
	return text, nil
}

// secretFile names a file with one line: a password or a token. It is read for each use, so a new
// secret needs no restart. The zero value names none.
type secretFile struct {
	flag string
	path string
}

func (f *secretFile) given() bool { return f.path != "" }

// parse reads the file once, so that an invalid one is refused at the start.
func (f *secretFile) parse(path string) error {
	f.path = path
	_, err := f.content()
	return err
}

// errSecretFile identifies these errors to code that must not repeat the driver's errors.
var errSecretFile = errors.New("the secret cannot be read")

// read returns the secret as it is now.
func (f *secretFile) read() (string, error) {
	text, err := f.content()
	if err != nil {
		return "", fmt.Errorf("%w: --%s: %w", errSecretFile, f.flag, err)
	}
	return text, nil
}

func (f *secretFile) content() (string, error) {
	text, err := readSettingsFile(f.path)
	if err != nil {
		return "", err
	}
	text = bytes.TrimSuffix(bytes.TrimSuffix(text, []byte("\n")), []byte("\r"))
	// PLAIN and OAUTHBEARER separate their fields with bytes 0 and 1.
	if bytes.ContainsAny(text, "\r\n\x00\x01") {
		return "", errors.New("want a file of one line of text")
	}
	return string(text), nil
}
