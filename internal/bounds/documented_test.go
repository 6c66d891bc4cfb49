package bounds_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/bounds"
)

// names are the constants outside of a package that its bounds use.
var names = map[string]int64{
	"time.Microsecond": int64(time.Microsecond), "time.Millisecond": int64(time.Millisecond), "time.Second": int64(time.Second),
	"time.Minute": int64(time.Minute), "time.Hour": int64(time.Hour),
	"dedup.WindowStandard": int64(dedup.WindowStandard), "dedup.WindowMin": int64(dedup.WindowMin), "dedup.WindowMax": int64(dedup.WindowMax),
}

// shared are the settings whose bounds the command line reads, too.
var shared = map[string]bounds.Range{
	"bounds.Lease": bounds.Lease, "bounds.PollMin": bounds.PollMin, "bounds.PollMax": bounds.PollMax,
	"bounds.TransactionMax": bounds.TransactionMax, "bounds.Keep": bounds.Keep, "bounds.DrainMax": bounds.DrainMax,
}

// Property: the comment of each setting of the library states the bounds and the default that the
// code applies.
func TestCommentsStateTheBounds(t *testing.T) {
	t.Parallel()
	found := 0
	for _, root := range []string{"relay", "consumer", "dedup", "outbox"} {
		err := filepath.WalkDir(filepath.Join("../..", root), func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				found += checkPackage(t, path)
			}
			return err
		})
		require.NoError(t, err)
	}
	require.Greater(t, found, 40, "settings with bounds; found %d", found)
}

// checkPackage checks the package in a directory and returns how many settings it has.
func checkPackage(t *testing.T, dir string) int {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	comments := map[string][]string{} // by field
	var settings []ast.Node
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments|parser.SkipObjectResolution)
		require.NoError(t, err)
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.Field:
				for _, name := range n.Names {
					comments[name.Name] = append(comments[name.Name], strings.Join(strings.Fields(n.Doc.Text()), " "))
				}
			case *ast.CompositeLit:
				if kind := selected(n.Type); kind == "bounds.Duration" || kind == "bounds.Int" {
					settings = append(settings, n)
				}
			case *ast.CallExpr:
				if method, ok := n.Fun.(*ast.SelectorExpr); ok && method.Sel.Name == "Of" && strings.HasPrefix(selected(method.X), "bounds.") {
					settings = append(settings, n)
				}
			}
			return true
		})
	}
	for _, node := range settings {
		s := settingOf(t, node)
		assert.True(t, slices.ContainsFunc(comments[s.field], s.statedBy), "%s: the comment of %s does not state %q to %q, default %q: %q",
			dir, s.field, s.lowest, s.highest, s.standard, comments[s.field])
	}
	return len(settings)
}

// setting is what a comment has to state of a field: each value in one of its forms; nil: the value
// depends on other settings.
type setting struct {
	field                     string
	standard, lowest, highest []string
}

func (s setting) statedBy(comment string) bool {
	comment = strings.ToLower(comment)
	_, standards, _ := strings.Cut(comment, "default")
	standards, _, _ = strings.Cut(standards, ".")
	return (s.standard == nil || contains(standards, s.standard, "", "")) &&
		(s.lowest == nil || contains(comment, s.lowest, "", " to ")) && contains(comment, s.highest, "to ", "")
}

// contains reports whether text has one of the forms as words of their own.
func contains(text string, forms []string, before, after string) bool {
	return slices.ContainsFunc(forms, func(form string) bool {
		return regexp.MustCompile(`\b` + regexp.QuoteMeta(before+form) + `s?\b` + regexp.QuoteMeta(after)).MatchString(text)
	})
}

func settingOf(t *testing.T, node ast.Node) (s setting) {
	t.Helper()
	switch node := node.(type) {
	case *ast.CallExpr:
		r, ok := shared[selected(node.Fun.(*ast.SelectorExpr).X)]
		require.True(t, ok, "list it in shared")
		s = setting{literal(t, node.Args[0]), durations(int64(r.Default)), durations(int64(r.Min)), durations(int64(r.Max))}
	case *ast.CompositeLit:
		forms := durations
		if selected(node.Type) == "bounds.Int" {
			forms = ints
		}
		for _, element := range node.Elts {
			pair := element.(*ast.KeyValueExpr)
			value, known := evaluate(pair.Value)
			switch key := pair.Key.(*ast.Ident).Name; {
			case key == "Field":
				s.field = literal(t, pair.Value)
			case key == "Default" && known:
				s.standard = forms(value)
			case key == "Min":
				s.lowest = forms(value)
			case key == "Max":
				s.highest = forms(value)
			}
		}
	}
	return s
}

// literal returns the value of a string, or of the first argument of a Sprintf.
func literal(t *testing.T, e ast.Expr) string {
	t.Helper()
	if call, ok := e.(*ast.CallExpr); ok {
		e = call.Args[0]
	}
	text, err := strconv.Unquote(e.(*ast.BasicLit).Value)
	require.NoError(t, err)
	first, _, _ := strings.Cut(text, " ")
	return first
}

func selected(e ast.Expr) string {
	s, ok := e.(*ast.SelectorExpr)
	if !ok {
		return ""
	}
	pkg, ok := s.X.(*ast.Ident)
	if !ok {
		return ""
	}
	return pkg.Name + "." + s.Sel.Name
}

// evaluate returns the value of a constant expression of numbers and the constants in names.
func evaluate(e ast.Expr) (int64, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		n, err := strconv.ParseInt(e.Value, 0, 64)
		return n, err == nil
	case *ast.SelectorExpr:
		n, ok := names[selected(e)]
		return n, ok
	case *ast.BinaryExpr:
		a, knownA := evaluate(e.X)
		b, knownB := evaluate(e.Y)
		if e.Op == token.MUL {
			return a * b, knownA && knownB
		}
		if e.Op == token.SHL {
			return a << b, knownA && knownB
		}
	}
	return 0, false
}

// durations are the forms in which comments write a duration.
func durations(n int64) (forms []string) {
	for _, unit := range []struct {
		size  time.Duration
		names []string
	}{
		{365 * 24 * time.Hour, []string{"year"}},
		{24 * time.Hour, []string{"day", "d"}},
		{time.Hour, []string{"h", "hour"}},
		{time.Minute, []string{"min", "minute"}},
		{time.Second, []string{"s", "second"}},
		{time.Millisecond, []string{"ms"}},
		{time.Microsecond, []string{"µs"}},
	} {
		if count := n / int64(unit.size); n%int64(unit.size) == 0 && count > 0 && count < 1000 {
			for _, name := range unit.names {
				forms = append(forms, fmt.Sprintf("%d %s", count, name))
			}
		}
	}
	return forms
}

// ints are the forms in which comments write a number.
func ints(n int64) []string {
	forms := []string{strconv.FormatInt(n, 10)}
	if n >= 1000 {
		forms = append(forms, fmt.Sprintf("%s,%03d", ints(n / 1000)[len(ints(n/1000))-1], n%1000))
	}
	for i, unit := range []string{"byte", "kib", "mib", "gib"} {
		if size := int64(1) << (10 * i); n%size == 0 && n >= size {
			forms = append([]string{fmt.Sprintf("%d %s", n/size, unit)}, forms...)
		}
	}
	return forms
}
