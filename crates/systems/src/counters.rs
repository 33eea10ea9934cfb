//! Numbers of events in a client's operations.

use std::cell::Cell;

/// Number of times that something has happened.
#[derive(Debug, Default)]
pub(crate) struct Counter(Cell<u64>);

impl Counter {
    pub(crate) fn add(&self) {
        self.0.set(self.0.get() + 1);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.get()
    }
}

/// Defines the counters of a system's clients: for each, the name of its field and its name in reports.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident: $text:literal;)*) => {
        /// The counters of a client.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $($(#[$doc])* pub(crate) $name: $crate::counters::Counter,)*
        }

        impl Counters {
            /// All counters with their names.
            pub(crate) fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$(($text, self.$name.get()),)*]
            }
        }
    };
}

pub(crate) use counters;
