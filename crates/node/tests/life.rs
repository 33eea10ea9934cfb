//! What becomes of buffers when clients die, stop, err or damage: the node stepped by hand.

mod support;

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            support::cases::$name();
        })*
    };
}
support::cases::with_all_cases!(tests);
