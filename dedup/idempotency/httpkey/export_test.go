package httpkey

// ParseKey is for fuzzing.
var ParseKey = parseKey
