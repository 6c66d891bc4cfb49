package bench

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
)

// A report is a struct whose figures are *float64 fields. The tags of a field are all that is said
// about its figure:
//
//	json    its key, which is also the key of its samples
//	of      the key of its samples, if that is another one
//	digits  the digits behind the decimal point that mean something; default 0
//	ratio   two keys of the report, as in by_id/textbook, in place of samples
//	row     what the table calls a rate, which it also compares with the first rate
//	fact    what the table calls another figure; {key} is the number of another field
//	as      the format of that fact
//
// A figure that could not be measured is nil, and left out of JSON and tables.

// figure is a field of a report.
type figure struct {
	reflect.StructTag
	key   string
	value **float64
}

// figuresOf returns the figures of a report in the order of its fields. report is a pointer.
func figuresOf(report any) (figures []figure) {
	v := reflect.ValueOf(report).Elem()
	for i := range v.NumField() {
		if value, ok := v.Field(i).Addr().Interface().(**float64); ok {
			tag := v.Type().Field(i).Tag
			key, _, _ := strings.Cut(tag.Get("json"), ",")
			figures = append(figures, figure{tag, key, value})
		}
	}
	return figures
}

// fill sets the figures of a report that are not set yet: first those of samples, then ratios.
func fill(report any, s samples) {
	figures, byKey := figuresOf(report), map[string]*float64{}
	for _, f := range figures {
		if *f.value == nil && f.Get("ratio") == "" {
			key := f.Get("of")
			if key == "" {
				key = f.key
			}
			digits, _ := strconv.Atoi(f.Get("digits")) // none: 0
			*f.value = rounded(s.median(key), digits)
		}
		byKey[f.key] = *f.value
	}
	for _, f := range figures {
		if a, b, is := strings.Cut(f.Get("ratio"), "/"); is {
			*f.value = ratio(byKey[a], byKey[b])
		}
	}
}

// figures adds the rates of a report, and below them its other figures.
func (t *table) figures(report any) {
	all := figuresOf(report)
	var first **float64
	for _, f := range all {
		if row := f.Get("row"); row != "" {
			if first == nil {
				first = f.value
			}
			t.row(row, *f.value, ratio(*f.value, *first))
		}
	}
	t.line("")
	for _, f := range all {
		if fact := f.Get("fact"); fact != "" {
			t.fact(withNumbers(fact, report), *f.value, f.Get("as"))
		}
	}
}

// withNumbers replaces {key} by the number that the report has under this key.
func withNumbers(text string, report any) string {
	v := reflect.ValueOf(report).Elem()
	for i := range v.NumField() {
		key, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		if n, ok := v.Field(i).Interface().(int); ok {
			text = strings.ReplaceAll(text, "{"+key+"}", fmt.Sprint(n))
		}
	}
	return text
}
