package httpkey_test

import (
	"net/http"

	"github.com/labstack/echo/v5"

	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
)

// echoRoutes uses echo (v5; v4 differs in that its context is no pointer, and c.Error(err) writes
// an error).
func echoRoutes(authenticate func(http.Handler) http.Handler, once *httpkey.Middleware) http.Handler {
	router := echo.New()
	router.Use(echo.WrapMiddleware(authenticate), echo.WrapMiddleware(once.Handler), writeErrors)
	router.POST("/orders/:order/shipments", func(c *echo.Context) error {
		if c.Param("order") == "unknown" {
			return echo.ErrNotFound
		}
		ship(c.Response(), c.Request(), c.Param("order"))
		return nil
	})
	router.Group("/shops/:shop").POST("/orders/:order/shipments", func(c *echo.Context) error {
		ship(c.Response(), c.Request(), c.Param("shop")+"-"+c.Param("order"))
		return nil
	})
	return router
}

// writeErrors writes the errors that a handler returns, inside of the middleware. Echo itself does
// so outside of all of them. That is too late: the empty response has counted as a success, and
// what the handler wrote before its error is committed. If the handler answered already, echo
// writes nothing more: Fail gives such a request up.
func writeErrors(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c *echo.Context) error {
		err := next(c)
		if err == nil {
			return nil
		}
		answered, _ := echo.UnwrapResponse(c.Response())
		switch method := c.Request().Method; {
		case answered == nil || !answered.Committed:
			c.Echo().HTTPErrorHandler(c, err)
		case method == http.MethodPost || method == http.MethodPatch: // the others pass through, by default
			httpkey.Fail(c.Request(), err)
		}
		return nil
	}
}

func ExampleMiddleware_Handler_echo() {
	run := func(authenticate func(http.Handler) http.Handler, once *httpkey.Middleware) error {
		return http.ListenAndServe(":8080", echoRoutes(authenticate, once))
	}
	_ = run
}
