package httpkey

// Detach is for its context, which a handler only sees by chance.
var Detach = detach
