//! Attacks on a node's engines, over every carrier, and on clients by what pretends to be a node.
//!
//! Invariant: datagrams are made by hand here, from the protocol's description, so that they can be wrong. While and
//! after an attack a well-behaved client finds all its data; a counter has moved; no byte of another tenant was seen;
//! every wait has a bound, and nobody panics.

mod bytes;
mod chains;
mod crowds;
mod datagrams;
mod deaths;
mod impostors;
mod metrics;
mod peer;
mod relay;
mod rings;
mod streams;
mod target;
mod tls;

/// Makes a test of each of these functions for each carrier.
macro_rules! on_each_carrier {
    ($($name:ident),+ $(,)?) => { on_each_carrier!(@of [udp tcp ring] [$($name)+]); };
    (@of [$($carrier:ident)+] $names:tt) => { $(on_each_carrier!(@on $carrier $names);)+ };
    (@on $carrier:ident [$($name:ident)+]) => {
        mod $carrier {
            $(
                #[test]
                fn $name() {
                    super::$name(stringify!($carrier));
                }
            )+
        }
    };
}
use on_each_carrier;
