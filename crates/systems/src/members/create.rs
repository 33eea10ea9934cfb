//! Creation of a store on several nodes: the choice of the nodes, the PREPARED members, and the decision.
//!
//! Invariant: no member is prepared before the first one, whose state is the decision.
//! Invariant: a creation that reports an error without [`Ran::Unknown`] has created nothing.

use super::requests::{ask, decide, not_understood, tell_all};
use super::survey::{Standing, Survey, Unfinished};
use super::{PAUSE, REPLICAS_MAX, ROUNDS, all, are_replicas};
use crate::registry::named;
use crate::store::StoreError;
use crate::system::{Nodes, Sizing};
use farside_remote::arena::SEGMENT_SIZE;
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Attempt, Decision, MEMBERS_MAX, MemberState, Membership, Store};
use farside_remote::draws::Draws;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, FabricError, NodeId};

/// Description of a store to create.
#[derive(Clone, Debug)]
pub struct New {
    /// Name of the store.
    pub name: String,
    /// Kind of the store.
    pub kind: String,
    /// Size of the whole store.
    pub sizing: Sizing,
    /// Bytes of memory of the whole store. If the members are replicas, bytes of memory of each.
    pub quota: u64,
    /// Number of members. The name of the store and the memories of the nodes determine which nodes these are, so that
    /// clients that list the nodes in other orders choose the same.
    pub members: usize,
}

impl New {
    /// Share of the quota and of the items that each member gets. A replica gets all of both.
    fn share(&self) -> (Sizing, u64) {
        if self.members < 2 || are_replicas(&self.kind) {
            return (self.sizing, self.quota);
        }
        let items =
            self.sizing.items.map(|items| items_of_member(items, self.members, self.sizing.collision_free));
        let quota = self.quota.div_ceil(self.members as u64).next_multiple_of(SEGMENT_SIZE);
        (Sizing { items, ..self.sizing }, quota)
    }
}

/// Number of items for which each of `members` members needs space, in a store of `items` items in all: 4 standard
/// deviations more than the mean, since hashing divides keys unevenly. If the store is collision-free, each number
/// needs a slot at the member that its hash selects, so at any member.
pub fn items_of_member(items: u64, members: usize, is_collision_free: bool) -> u64 {
    if members < 2 || is_collision_free {
        return items;
    }
    let mean = items as f64 / members as f64;
    let deviation = (mean * (1.0 - 1.0 / members as f64)).sqrt();
    ((mean + 4.0 * deviation).ceil() as u64).min(items)
}

/// Creates a store over [`New::members`] nodes of a pool of `nodes` nodes. `attempt` is random. Returns the
/// nodes and the descriptions of the members, without their keys. A member is missing from this list if its node did
/// not answer, and another client has committed the store. Aborts unfinished attempts of the same name.
///
/// # Errors
/// [`StoreError`]. Nothing was created, except if the error is a [`FabricError`] whose [`FabricError::ran`] is
/// [`Ran::Unknown`]: then the store may have been created.
pub async fn create<F: Fabric + Clock>(
    fabric: &F,
    nodes: u32,
    new: &New,
    attempt: Attempt,
) -> Result<Vec<(NodeId, Store)>, StoreError> {
    create_at(fabric, nodes, new, Placement { name: &new.name, skip: 0 }, attempt).await
}

/// Nodes on which a store lies: those that rank first for a name, without the first `skip` ones.
#[derive(Clone, Copy, Debug)]
pub struct Placement<'a> {
    /// Name for which the nodes are ranked. The stores of a volume are ranked for the same name, so that each lies on
    /// nodes of its own.
    pub name: &'a str,
    /// Number of nodes to leave out.
    pub skip: usize,
}

/// Creates a store as [`create`] does, on these nodes.
///
/// # Errors
/// Those of [`create`].
pub async fn create_at<F: Fabric + Clock>(
    fabric: &F,
    nodes: u32,
    new: &New,
    at: Placement<'_>,
    attempt: Attempt,
) -> Result<Vec<(NodeId, Store)>, StoreError> {
    let New { name, kind, members, .. } = new;
    check_distribution(new, nodes.saturating_sub(at.skip as u32))?;
    let (sizing, quota) = new.share();
    let [low, high] = attempt;
    let sizing = Sizing { seed: Some(Draws(low ^ high.rotate_left(32)).next()), ..sizing };
    // The node refuses a kind that this release does not know, whatever its parameters.
    let parameters = named(kind).map_or_else(|| sizing.parameters(), |system| (system.parameters)(&sizing));
    let (name, kind) = (name.clone(), kind.clone());
    if nodes == 1 {
        let request = Ask::CreateStore { name, kind, parameters, quota };
        return match ask(fabric, NodeId(0), &request).await? {
            Answer::Store(store) => Ok(vec![(NodeId(0), store)]),
            _ => Err(not_understood(NodeId(0))),
        };
    }
    let survey = free_name(fabric, nodes, &name).await?;
    let ids = survey.chosen(*members, at)?;
    let chosen: Vec<NodeId> = ids.iter().map(|id| NodeId(id.node)).collect();
    if let [node] = chosen[..] {
        return match ask(fabric, node, &Ask::CreateStore { name, kind, parameters, quota }).await? {
            Answer::Store(store) => Ok(vec![(node, store)]),
            _ => Err(not_understood(node)),
        };
    }
    let (state, configuration) = (MemberState::Prepared, 1);
    let prepare = |index: u32| {
        let membership = Membership { attempt, state, index, configuration, members: ids.clone() };
        let (name, kind, parameters) = (name.clone(), kind.clone(), parameters.clone());
        let request = Ask::PrepareStore { name, kind, parameters, quota, membership };
        let node = chosen[index as usize];
        async move {
            let Ask::PrepareStore { name, membership, .. } = &request else {
                unreachable!("it was just built")
            };
            match ask(fabric, node, &request).await? {
                Answer::Store(store)
                    if store.name == *name
                        && store.membership.as_ref() == Some(membership)
                        && store.incarnation == membership.members[index as usize].incarnation =>
                {
                    Ok(store)
                }
                _ => Err(not_understood(node)),
            }
        }
    };
    let mut prepared = vec![prepare(0).await];
    if prepared[0].is_ok() {
        prepared.extend(all((1..chosen.len() as u32).map(prepare)).await);
    }
    let failure = prepared.iter().find_map(|prepared| prepared.as_ref().err().cloned());
    let may_be_prepared = |prepared: &Result<Store, StoreError>| match prepared {
        Ok(_) => true,
        Err(StoreError::Fabric(error)) => error.ran() != Ran::No,
        Err(_) => false,
    };
    let may_be_everywhere = prepared.len() == chosen.len() && prepared.iter().all(may_be_prepared);
    let decision = if failure.is_some() { Decision::Abort } else { Decision::Commit };
    let state = decide(fabric, chosen[0], &name, attempt, decision, ids[0].incarnation).await;
    let state = match (state, failure) {
        (Ok(MemberState::Committed), None) => MemberState::Committed,
        (Ok(MemberState::Committed), Some(_)) if may_be_everywhere => MemberState::Committed,
        // No correct client commits an attempt that is not PREPARED at all members.
        (Ok(MemberState::Committed), Some(failure)) => return Err(failure),
        (Ok(_), failure) => {
            let told = tell_all(fabric, &name, attempt, Decision::Abort, &chosen[1..]).await;
            if told.is_committed {
                return Err(unknown(chosen[0], StoreError::Gone(OVERTAKEN.into())));
            }
            return Err(failure.unwrap_or_else(|| {
                StoreError::Gone(format!(
                    "store '{name}' was not created: another client that creates or drops it aborted this attempt; \
                     retry"
                ))
            }));
        }
        // A client that finds the attempt PREPARED at all members commits it, also if no decision was requested here.
        (Err(error), _) if may_be_everywhere => return Err(unknown(chosen[0], error)),
        (Err(error), failure) => return Err(failure.unwrap_or(error)),
    };
    // If a member does not answer, a client that opens the store reports the decision later.
    tell_all(fabric, &name, attempt, Decision::Commit, &chosen[1..]).await;
    let committed = |mut store: Store| {
        if let Some(membership) = &mut store.membership {
            membership.state = state;
        }
        store
    };
    let described = chosen.into_iter().zip(prepared);
    Ok(described.filter_map(|(node, store)| Some((node, committed(store.ok()?)))).collect())
}

/// # Errors
/// The pool has too few nodes, or a store of this kind cannot have that many members.
fn check_distribution(new: &New, nodes: u32) -> Result<(), StoreError> {
    let New { name, kind, members, .. } = new;
    if *members == 0 || *members > nodes as usize || *members > MEMBERS_MAX {
        return Err(StoreError::Gone(format!(
            "store '{name}' cannot have {members} members: give --members from 1 to {}, the number of nodes in \
             the pool",
            (nodes as usize).min(MEMBERS_MAX)
        )));
    }
    let system = named(kind);
    if let Some(most) = system.map(|system| system.members_max).filter(|most| *members > *most) {
        return Err(StoreError::Gone(format!(
            "{kind} stores have at most {most} members, and not {members}: create it with --members {most}"
        )));
    }
    let distribution = system.map(|system| system.nodes);
    if distribution == Some(Nodes::Replicas) && (*members % 2 == 0 || *members > REPLICAS_MAX) {
        return Err(StoreError::Gone(format!(
            "a {kind} store has an odd number of replicas, at most {REPLICAS_MAX}, and not {members}: create it with \
             --members 3, which survives the loss of one"
        )));
    }
    if *members > 1 && distribution == Some(Nodes::One) {
        return Err(StoreError::Gone(format!(
            "a {kind} store lies on one node, and the pool has {nodes}: create it with --members 1, or on a pool of \
             one node"
        )));
    }
    Ok(())
}

/// Returns a survey of the pool in which no node has a store of this name. Aborts unfinished attempts.
async fn free_name<F: Fabric + Clock>(fabric: &F, nodes: u32, name: &str) -> Result<Survey, StoreError> {
    for round in 0..ROUNDS {
        if round > 0 {
            fabric.sleep(PAUSE * (1 << round)).await;
        }
        let survey = Survey::of(fabric, nodes, name).await?;
        match survey.settle(fabric, Unfinished::Abort).await? {
            Standing::Here(_) | Standing::Alone(_) => {
                return Err(StoreError::Gone(format!(
                    "there is a store '{name}' already: drop it first, or choose another name"
                )));
            }
            Standing::Absent => return Ok(survey),
            Standing::Changed | Standing::Undecided => {}
        }
    }
    Err(StoreError::BeingCreated { name: name.to_owned() })
}

const OVERTAKEN: &str = "another client has completed the creation, and the first member was replaced since";

/// Error of a creation whose decision at the first member is unknown.
fn unknown(node: NodeId, error: StoreError) -> StoreError {
    let reason = match error {
        StoreError::Fabric(error) if error.ran() == Ran::Unknown => return StoreError::Fabric(error),
        lost @ StoreError::MemoryLost { .. } => return lost,
        StoreError::Fabric(FabricError::Unreachable { reason, .. }) => reason,
        other => other.to_string(),
    };
    StoreError::Fabric(FabricError::Lost { node, ran: Ran::Unknown, reason })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::smart;

    #[test]
    fn an_index_has_at_most_eight_members() {
        let new = |members| {
            let (name, kind) = ("s".to_owned(), smart::KIND.to_owned());
            New { name, kind, sizing: Sizing::default(), quota: 1 << 30, members }
        };
        assert_eq!(check_distribution(&new(8), 9), Ok(()));
        let refused = check_distribution(&new(9), 9).expect_err("no client could open it").to_string();
        let expected = "smart stores have at most 8 members, and not 9: create it with --members 8";
        assert!(refused.contains(expected), "{refused}");
    }
}
