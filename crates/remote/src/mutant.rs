//! The switch for deliberately broken variants of the code: published flaws and pitfalls, one at a time, so that the
//! tests can show that they would notice. Each crate lists its own variants by [`mutants!`](crate::mutants!).
//!
//! Invariant: without `--cfg farside_mutants` no variant can be switched on, and the check costs nothing.

/// A broken variant, known by its name. Names are unique among all crates.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Mutant(&'static str);

impl Mutant {
    /// A variant of this name.
    pub const fn new(name: &'static str) -> Mutant {
        Mutant(name)
    }

    /// Its name, as flags and reports have it.
    pub const fn name(self) -> &'static str {
        self.0
    }

    /// Whether it is switched on for this thread.
    #[inline(always)]
    #[must_use]
    pub fn is_on(self) -> bool {
        #[cfg(farside_mutants)]
        return switch::ON.get() == Some(self);
        #[cfg(not(farside_mutants))]
        false
    }
}

impl std::fmt::Debug for Mutant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

/// Declares the broken variants of a module, each a constant with its name, and the list `ALL` of them.
///
/// ```
/// mod mutants {
///     farside_remote::mutants! {
///         /// The last byte is not copied.
///         SHORT_COPY = "ShortCopy";
///     }
/// }
/// assert!(!mutants::SHORT_COPY.is_on());
/// assert_eq!(mutants::ALL[0].name(), "ShortCopy");
/// ```
#[macro_export]
macro_rules! mutants {
    ($($(#[$doc:meta])* $constant:ident = $name:literal;)*) => {
        $($(#[$doc])* pub const $constant: $crate::mutant::Mutant = $crate::mutant::Mutant::new($name);)*

        /// All of them.
        pub const ALL: &[$crate::mutant::Mutant] = &[$($constant),*];
    };
}

#[cfg(farside_mutants)]
mod switch {
    use super::Mutant;
    use std::cell::Cell;

    thread_local! {
        pub(super) static ON: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    impl Mutant {
        /// Switches one variant on for this thread, or all off.
        pub fn switch(to: Option<Mutant>) {
            ON.set(to);
        }
    }
}
