//! The list of systems, one line for each, and the tables, enums and macros that are generated from the list.
//!
//! A new system needs its folder, its line here, and its page in `docs/papers`.
//!
//! Invariant: this list alone decides which systems exist.

use crate::blocks::abd_lock::service::AbdLockKind;
use crate::blocks::prism_rs::service::PrismRsKind;
use crate::erased::Erased;
use crate::guarded::GuardedKind;
use crate::index::art::system::ArtKind;
use crate::index::sherman::system::ShermanKind;
use crate::index::smart::system::SmartKind;
use crate::kv::cached_index::service::CachedIndexKind;
use crate::kv::chequer::{ChequerKind, ChequerMessageKind};
use crate::kv::farm_kv::service::FarmKvKind;
use crate::kv::pilaf::service::PilafKind;
use crate::kv::prism_kv::service::PrismKvKind;
use crate::latch::system::LatchKind;
use crate::queue::ring_queue::RingQueueKind;
use crate::raw::RawKind;
use crate::rpc::echo::EchoKind;
use crate::store::{self, Members, StoreError};
use crate::system::{Family, Footprint, Nodes, Options, Shape, Sizing, SizingError, System, Work};
use crate::txn::farm::service::FarmKind;
use crate::txn::fasst::service::FasstKind;
use crate::txn::prism_tx::service::PrismTxKind;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::mutant::Mutant;
use farside_remote::service::Kind;
use farside_remote::{Capabilities, Fabric, Memory, NodeId};
use std::pin::Pin;

/// Generates the tables of systems, and for each family the enum of its clients and the macro that dispatches on it.
///
/// The input has one block for each family, with one line for each system of the family. The last block lists the
/// systems that are alone in their family.
macro_rules! registry {
    (
        $($(#[$doc:meta])* family $family:ident: $any:ident by $with:ident $dollar:tt {
            $($variant:ident = $system:ident;)*
        })*
        alone { $($alone:ident;)* }
    ) => {
        /// All systems, grouped by family.
        pub const ALL: &[Registered] =
            &[$($(Registered::of::<$system>(),)*)* $(Registered::of::<$alone>(),)*];

        /// Returns the node-side halves of all systems.
        pub fn all_kinds<M: Memory>() -> Vec<Box<dyn Kind<M>>> {
            vec![$($(<$system as System>::kind::<M>(),)*)* $(<$alone as System>::kind::<M>(),)*]
        }

        /// Calls the [`System::heal`] of the store that `members` describe. Returns a sentence for each repair.
        ///
        /// # Errors
        /// [`StoreError`]; the store is as correct as before. This release may not know the store's kind.
        pub async fn heal<F: Fabric + Clock>(
            fabric: F,
            members: &Members,
            options: &Options,
        ) -> Result<Vec<String>, StoreError> {
            heal_over(Erased::of(&fabric), members, options).await
        }

        /// Boxed, so that the future is compiled here and not by each user of [`heal`].
        fn heal_over<'a>(
            fabric: Erased<'a>,
            members: &'a Members,
            options: &'a Options,
        ) -> Pin<Box<dyn Future<Output = Result<Vec<String>, StoreError>> + 'a>> {
            Box::pin(async move {
                match members.store().kind.as_str() {
                    $($(<$system as System>::KIND => <$system as System>::heal(fabric, members, options).await,)*)*
                    $(<$alone as System>::KIND => <$alone as System>::heal(fabric, members, options).await,)*
                    _ => Err(of_unknown_kind(members.store())),
                }
            })
        }

        $(
            $(#[$doc])*
            #[allow(
                clippy::large_enum_variant,
                reason = "a task has one client, and the path to the most used system must be the shortest"
            )]
            pub enum $any<F: Fabric + Clock> {
                $(
                    #[doc = concat!("See [`", stringify!($system), "`].")]
                    $variant(<$system as System>::Client<F>),
                )*
            }

            impl<F: Fabric + Clock> $any<F> {
                /// Opens the store called `name`, of any kind in this family, at `node`. Makes one call to the node.
                ///
                /// # Errors
                /// [`StoreError`]; nothing was changed.
                pub async fn open(
                    fabric: F,
                    node: NodeId,
                    name: &str,
                    options: &Options,
                ) -> Result<$any<F>, StoreError> {
                    let store = store::fetch(&fabric, node, name).await?;
                    $any::of(fabric, &Members::one(node, store), options).await
                }

                /// Creates a client of the store that `members` describe.
                ///
                /// # Errors
                /// [`StoreError`]; nothing was changed.
                pub async fn of(
                    fabric: F,
                    members: &Members,
                    options: &Options,
                ) -> Result<$any<F>, StoreError> {
                    match members.store().kind.as_str() {
                        $(<$system as System>::KIND => {
                            <$system as System>::open(fabric, members, options).await.map($any::$variant)
                        })*
                        _ => Err(of_another_family(members.store(), Family::$family)),
                    }
                }
            }

            /// Evaluates the expression `then`, with `client` bound to the client inside the enum `any`. The dispatch
            /// is static, so the operation costs no more than the system's own. With `->` in place of `=>`, `then` is
            /// another client of the same system, and the result is that client as the enum.
            #[macro_export]
            macro_rules! $with {
                ($dollar any:expr, $dollar client:ident => $dollar then:expr) => {
                    match $dollar any {
                        $($crate::registry::$any::$variant($dollar client) => $dollar then,)*
                    }
                };
                ($dollar any:expr, $dollar client:ident -> $dollar then:expr) => {
                    match $dollar any {
                        $($crate::registry::$any::$variant($dollar client) => {
                            $crate::registry::$any::$variant($dollar then)
                        })*
                    }
                };
            }
        )*
    };
}

registry! {
    /// A client of a key-value store of any kind that lies on one node; see [`crate::kv::AnyKv`].
    family Kv: OneKv by with_one_kv $ {
        PrismKv = PrismKvKind;
        Pilaf = PilafKind;
        FarmKv = FarmKvKind;
        CachedIndex = CachedIndexKind;
        Chequer = ChequerKind;
        ChequerMessage = ChequerMessageKind;
    }
    /// A client of a block store of any kind.
    family Blocks: AnyBlocks by with_blocks $ {
        PrismRs = PrismRsKind;
        AbdLock = AbdLockKind;
    }
    /// A client of a queue of any kind.
    family Queue: AnyQueue by with_queue $ {
        RingQueue = RingQueueKind;
    }
    /// A client of an index of any kind.
    family Index: AnyIndex by with_index $ {
        Smart = SmartKind;
        Art = ArtKind;
        Sherman = ShermanKind;
    }
    /// A client of a transactional store of any kind.
    family Txn: AnyTxn by with_txn $ {
        PrismTx = PrismTxKind;
        Farm = FarmKind;
        Fasst = FasstKind;
    }
    alone {
        GuardedKind;
        LatchKind;
        EchoKind;
        RawKind;
    }
}

// A macro that another macro defines has no path of its own.
#[doc(hidden)]
pub use with_one_kv;

/// Node-side halves of all systems, except systems that exist for tests only.
pub fn kinds<M: Memory>() -> Vec<Box<dyn Kind<M>>> {
    let is_for_tests = |kind: &dyn Kind<M>| named(kind.name()).is_some_and(|system| system.for_tests);
    all_kinds().into_iter().filter(|kind| !is_for_tests(&**kind)).collect()
}

/// A system's constants and functions as a value, for tables such as [`ALL`].
#[derive(Clone, Copy, Debug)]
pub struct Registered {
    /// The system's [`System::KIND`].
    pub kind: &'static str,
    /// The system's [`System::TITLE`].
    pub title: &'static str,
    /// The system's [`System::SUMMARY`].
    pub summary: &'static str,
    /// The system's [`System::FAMILY`].
    pub family: Family,
    /// The system's [`System::NODES`].
    pub nodes: Nodes,
    /// The system's [`System::MEMBERS_MAX`].
    pub members_max: usize,
    /// The system's [`System::REPLACES_MEMBERS`].
    pub replaces_members: bool,
    /// The system's [`System::FOR_TESTS`].
    pub for_tests: bool,
    /// The system's [`System::NEEDS`].
    pub needs: Capabilities,
    /// The system's [`System::MUTANTS`].
    pub mutants: &'static [Mutant],
    /// The system's [`System::RARE_MUTANTS`].
    pub rare_mutants: &'static [Mutant],
    /// The system's [`System::WORK`].
    pub work: Work,
    /// The system's [`System::parameters`].
    pub parameters: fn(&Sizing) -> String,
    /// The system's [`System::footprint`].
    pub footprint: fn(&Sizing) -> Result<Footprint, SizingError>,
    /// The system's [`System::shape`].
    pub shape: fn(&str) -> Option<Shape>,
    /// The system's [`System::losses`].
    pub losses: fn(&str, usize) -> usize,
}

impl Registered {
    /// Returns the constants and functions of the system `S`.
    pub const fn of<S: System>() -> Registered {
        Registered {
            kind: S::KIND,
            title: S::TITLE,
            summary: S::SUMMARY,
            family: S::FAMILY,
            nodes: S::NODES,
            members_max: S::MEMBERS_MAX,
            replaces_members: S::REPLACES_MEMBERS,
            for_tests: S::FOR_TESTS,
            needs: S::NEEDS,
            mutants: S::MUTANTS,
            rare_mutants: S::RARE_MUTANTS,
            work: S::WORK,
            parameters: S::parameters,
            footprint: S::footprint,
            shape: S::shape,
            losses: S::losses,
        }
    }
}

/// Returns the systems of a family.
pub fn family(family: Family) -> impl Iterator<Item = &'static Registered> {
    ALL.iter().filter(move |system| system.family == family)
}

/// Returns the default key-value system: the first system of its family.
pub fn default_kv() -> &'static Registered {
    family(Family::Kv).next().expect("there is a key-value store")
}

/// Returns the system whose [`System::KIND`] is `kind`; `None` if there is no such system.
pub fn named(kind: &str) -> Option<&'static Registered> {
    ALL.iter().find(|system| system.kind == kind)
}

/// Returns the shape of a store's table; `None` if the store's system cannot rebuild tables.
pub fn shape_of(store: &Store) -> Option<Shape> {
    named(&store.kind).and_then(|system| (system.shape)(&store.parameters))
}

/// Returns the kinds of a family's systems, joined for a sentence: `prism-kv or pilaf`.
pub fn names(of: Family) -> String {
    joined(family(of).filter(|system| !system.for_tests))
}

/// Returns the kinds of these systems, joined for a sentence: `prism-kv, pilaf or prism-rs`.
pub fn joined(systems: impl Iterator<Item = &'static Registered>) -> String {
    let names: Vec<&str> = systems.map(|system| system.kind).collect();
    match names.split_last() {
        Some((last, before)) if !before.is_empty() => format!("{} or {last}", before.join(", ")),
        _ => names.concat(),
    }
}

fn of_another_family(store: &Store, wanted: Family) -> StoreError {
    match named(&store.kind) {
        Some(system) => {
            let (is, wanted) = (system.family.noun(), wanted.noun());
            let remedy = match system.family.command() {
                Some(command) => format!("use '{command}', or name another store"),
                None => "name another store".to_owned(),
            };
            StoreError::Gone(format!("store '{}' is {is}, not {wanted}: {remedy}", store.name))
        }
        None => of_unknown_kind(store),
    }
}

fn of_unknown_kind(store: &Store) -> StoreError {
    StoreError::Gone(format!(
        "store '{}' is of kind '{}', which this release does not support: use the release that created it, or name \
         another store",
        store.name, store.kind
    ))
}
