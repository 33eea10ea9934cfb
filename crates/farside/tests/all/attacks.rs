//! Attacks on a node's engines over every carrier, and attacks on clients by impostors of a node.
//!
//! Invariant: these tests build datagrams by hand, from the protocol's description, so that any field can be wrong.
//! Invariant: during and after an attack, a well-behaved client finds all its data, a counter records the attack, the
//! attacker has seen no byte of another tenant, every wait is bounded, and no process panics.

pub(crate) mod bytes;
mod chains;
mod crowds;
mod datagrams;
mod deaths;
mod impostors;
mod metrics;
pub(crate) mod peer;
mod relay;
mod rings;
mod streams;
mod target;
mod tls;

/// Defines one test for each pair of a function and a carrier.
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

/// Defines the tests of [`on_each_carrier`], and those over an RDMA device, which `cargo xtask verbs` runs.
macro_rules! on_each_carrier_and_device {
    ($($name:ident),+ $(,)?) => {
        on_each_carrier![$($name),+];
        #[cfg(feature = "verbs")]
        mod verbs {
            $(
                #[test]
                #[ignore = "takes an RDMA device: cargo xtask verbs"]
                fn $name() {
                    let before = crate::verbs::Resources::now();
                    super::$name("verbs");
                    before.are_back();
                }
            )+
        }
    };
}
use on_each_carrier_and_device;
