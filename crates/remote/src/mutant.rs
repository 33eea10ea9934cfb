//! The switch for mutants: deliberately broken variants of the code, one at a time, that model published flaws and
//! pitfalls. Tests use them to show that they detect such flaws. Each crate lists its mutants with
//! [`mutants!`](crate::mutants!).
//!
//! Invariant: without `--cfg farside_mutants` no mutant can be switched on, and the check costs nothing.

/// A deliberately broken variant of the code. Its name is unique among all crates.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Mutant(&'static str);

impl Mutant {
    /// Creates a mutant with the given name.
    pub const fn new(name: &'static str) -> Mutant {
        Mutant(name)
    }

    /// Returns the mutant's name in flags and reports.
    pub const fn name(self) -> &'static str {
        self.0
    }

    /// Whether the mutant is on in this thread.
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

/// Declares a module's mutants: one constant each, and the list `ALL`.
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

        /// All mutants of this module.
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
        /// Switches on the given mutant in this thread and all others off, or with `None` all off.
        pub fn switch(to: Option<Mutant>) {
            ON.set(to);
        }
    }
}
