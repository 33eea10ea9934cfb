//! Recovery: a client that completes what other clients left unfinished, and repairs what they left behind when they
//! died. Nodes never call nodes, so recovery is a client like any other.
//!
//! [`heal`] first settles unfinished creations and drops ([`members::settle`]), then opens each store and calls its
//! system's healer ([`crate::system::System::heal`]).
//!
//! Invariant: a recoverer may die at any point, and several may run at the same time, with other clients.

use crate::members::{self, End};
use crate::registry;
use crate::store::{Loss, StoreError};
use crate::system::Options;
use farside_remote::clock::Clock;
use farside_remote::{Fabric, NodeId};
use std::collections::BTreeSet;
use std::time::Duration;

/// Time after which an attempt that is PREPARED at some members only is aborted. A living creator needs much less,
/// since nodes prepare members at the same time.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// One thing that was done to a store, or could not be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Healed {
    /// Name of the store.
    pub store: String,
    /// What was done.
    pub action: Action,
}

/// What was done to a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// A creation was completed.
    Created {
        /// Number of nodes that held a member before.
        held: u32,
        /// Number of members.
        members: u32,
    },
    /// A creation was aborted.
    Aborted {
        /// Number of nodes that held a member before.
        held: u32,
        /// Number of members that the store was to have.
        members: u32,
    },
    /// A drop was completed.
    Dropped {
        /// Number of nodes that still held a member.
        held: u32,
        /// Number of members that the store had.
        members: u32,
    },
    /// The system's healer has made this repair.
    Repaired(String),
    /// The store was left as it is, for this reason.
    Left(StoreError),
}

impl Action {
    /// Name of the action in reports for programs.
    pub fn name(&self) -> &'static str {
        match self {
            Action::Created { .. } => "created",
            Action::Aborted { .. } => "aborted",
            Action::Dropped { .. } => "dropped",
            Action::Repaired(_) => "repaired",
            Action::Left(_) => "left",
        }
    }

    /// Number of nodes that held a member, and number of members, of a store that was settled.
    pub fn members(&self) -> Option<(u32, u32)> {
        match *self {
            Action::Created { held, members }
            | Action::Aborted { held, members }
            | Action::Dropped { held, members } => Some((held, members)),
            Action::Repaired(_) | Action::Left(_) => None,
        }
    }
}

impl std::fmt::Display for Healed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "store '{}': ", self.store)?;
        match &self.action {
            Action::Created { held, members } => {
                write!(f, "prepared at {held} of {members} nodes, creation completed")
            }
            Action::Aborted { held, members } => {
                write!(f, "created at {held} of {members} nodes, attempt aborted")
            }
            Action::Dropped { held, members } => {
                write!(f, "left at {held} of {members} nodes by a drop, drop completed")
            }
            Action::Repaired(what) => f.write_str(what),
            Action::Left(error) => write!(f, "not healed: {error}"),
        }
    }
}

/// What [`heal`] looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Number of stores that exist.
    pub stores: u32,
    /// Nodes that did not answer, with the reason. What they hold was not healed.
    pub silent: Vec<(NodeId, StoreError)>,
}

/// Heals the stores in a pool of `nodes` nodes, or only the one called `only`. Calls `tell` for each thing that was
/// done, or could not be done. `patience` is that of [`members::settle`]. `entropy` is random, drawn anew for each
/// call: no two recoverers may have the same.
///
/// # Errors
/// No node has answered, or there is no store called `only`. Nothing was changed.
pub async fn heal<F: Fabric + Clock>(
    fabric: &F,
    nodes: u32,
    only: Option<&str>,
    patience: Duration,
    entropy: u64,
    mut tell: impl FnMut(Healed),
) -> Result<Seen, StoreError> {
    let (listed, silent) = members::names(fabric, nodes).await?;
    let names: BTreeSet<String> = match only {
        None => listed,
        Some(name) => {
            if !listed.contains(name) {
                // The error says whether a node that does not answer may hold the store.
                members::open(fabric, nodes, name).await?;
            }
            [name.to_owned()].into()
        }
    };
    let (mut seen, options) = (Seen { stores: 0, silent }, Options { entropy, ..Options::default() });
    for store in names {
        let mut tell = |action| tell(Healed { store: store.clone(), action });
        if let Some(settled) = members::settle(fabric, nodes, &store, patience).await {
            let (held, members) = (settled.held, settled.members);
            let is_there = settled.end == End::Created;
            tell(match settled.end {
                End::Created => Action::Created { held, members },
                End::Aborted => Action::Aborted { held, members },
                End::Dropped => Action::Dropped { held, members },
                End::Left(error) => Action::Left(error),
            });
            if !is_there {
                continue;
            }
        }
        // A replacement that is not complete is no reason to wait: its recoverer may have died.
        let mut found = members::open_within(fabric, nodes, &store, Duration::ZERO).await;
        if found.is_err() {
            // Another client may have dropped the store meanwhile, and created one of the same name.
            if members::names(fabric, nodes).await.is_ok_and(|(names, _)| !names.contains(&store)) {
                continue;
            }
            found = members::open_within(fabric, nodes, &store, Duration::ZERO).await;
        }
        let opened = match found {
            Ok(opened) => opened,
            // No member serves the store.
            Err(error @ StoreError::BeingReplaced { .. }) => {
                match members::describe(fabric, nodes, &store).await {
                    Ok(described) => described,
                    Err(_) => {
                        tell(Action::Left(error));
                        continue;
                    }
                }
            }
            Err(error) => {
                tell(Action::Left(error));
                continue;
            }
        };
        seen.stores += 1;
        let healed = registry::heal(fabric, &opened, &options).await;
        let is_whole = opened.list().iter().all(|member| member.store.is_ok());
        // What was missing when the store was opened may be there now: another recoverer may have been first.
        let reopened = match &healed {
            Ok(repairs) if !(is_whole && repairs.is_empty()) => members::open(fabric, nodes, &store).await,
            _ => Ok(opened),
        };
        let missing = match &reopened {
            Ok(opened) => opened.list().iter().filter_map(|member| member.store.as_ref().err()).collect(),
            Err(error) => vec![error],
        };
        for error in missing {
            // The healer's error says why such a member was not replaced.
            let is_told =
                matches!(error, StoreError::MemoryLost { loss: Loss::Replaceable | Loss::Majority, .. });
            if !(is_told && healed.is_err()) {
                tell(Action::Left(error.clone()));
            }
        }
        match healed {
            Ok(repairs) => repairs.into_iter().for_each(|repair| tell(Action::Repaired(repair))),
            Err(error) => tell(Action::Left(error)),
        }
    }
    Ok(seen)
}
