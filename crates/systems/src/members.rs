//! Stores with several members: their creation, opening and dropping, and the completion of what other clients left
//! unfinished. A client coordinates; nodes never call nodes.
//!
//! A member is identified by the incarnation of its node's memory, and a store by the attempt that created it. An
//! attempt is PREPARED at the first member, then at the others. The state at the first member is the only decision:
//! PREPARED becomes COMMITTED or ABORTED there, once. Then the client reports that state to the others. A drop makes
//! COMMITTED ABORTED, in the same order.
//!
//! An aborted member is removed, so a first member that lives and lacks the attempt has aborted it. This is safe: the
//! first member is prepared before any other, never twice for one attempt, and its answers are in its catalog's record.
//!
//! `create` creates, `survey` looks and settles what it finds, `requests` asks the nodes.
//!
//! A store of replicas has *configurations*: numbered lists of members. Module `configuration` changes them. The
//! current configuration is the highest that a member serves or has served. A member that missed it is *behind*.
//! A first member may then have been replaced, and have left. So a member of a configuration above 1 refuses to abort,
//! and the rest of a dropped store is removed only once all other members have answered.
//!
//! Invariant: no key of a member that is not COMMITTED is given to any client.
//! Invariant: members of two attempts are never in one list.
//! Invariant: a member that has lost its memory is an error of its own, never a missing store.
//! Invariant: a member counts as lost only if the node that held it has another memory, or if all nodes have answered.

pub(crate) mod configuration;
mod create;
mod requests;
mod survey;

pub use create::{New, Placement, create, create_at, items_of_member};
pub(crate) use farside_remote::control::MemberId;
pub(crate) use requests::{all, wait_for};
use requests::{ask, find, not_understood};
pub(crate) use survey::Place;
use survey::{Standing, Survey, Unfinished};

use crate::mutants;
use crate::registry::named;
use crate::store::{Loss, Member, Members, StoreError, fetch};
use crate::system::Nodes;
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Attempt, Decision, MemberState, Membership, Store};
use farside_remote::fabric::DEADLINE;
use farside_remote::{Fabric, NodeId};
use std::collections::BTreeSet;
use std::time::Duration;

/// What [`settle`] found and did about one store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settled {
    /// Name of the store.
    pub name: String,
    /// Number of members that the store was to have; 0 if a node refused to answer.
    pub members: u32,
    /// Number of nodes that held a member when it was found.
    pub held: u32,
    /// Outcome.
    pub end: End,
}

/// Outcome of an unfinished creation or drop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The creation was completed: the store exists.
    Created,
    /// The creation was aborted, and its memory was freed.
    Aborted,
    /// The drop was completed, and its memory was freed.
    Dropped,
    /// The store was left as it is, for this reason.
    Left(StoreError),
}

/// Largest number of replicas of a store.
pub const REPLICAS_MAX: usize = 5;
/// Number of times that a function looks at the pool's nodes before it reports that another client interferes.
const ROUNDS: u32 = 6;
/// Pause after the first look. Each further pause is twice as long.
const PAUSE: Duration = Duration::from_millis(1);
/// Number of attempts to report a decision to a member that does not answer.
const TELLS: u32 = 3;

/// Opens the store called `name` in a pool of `nodes` nodes, which have the numbers from 0: returns its members with
/// their keys. Completes a creation or a drop that another client has decided. A member that has lost its memory or
/// does not answer has an error in the list.
///
/// # Errors
/// [`StoreError`]. The store is missing only if every node has answered.
pub async fn open<F: Fabric + Clock>(fabric: &F, nodes: u32, name: &str) -> Result<Members, StoreError> {
    open_within(fabric, nodes, name, DEADLINE).await
}

/// Does the same as [`open`]. Waits for at most `patience` if no member serves the store, since one is being replaced.
///
/// # Errors
/// The errors of [`open`].
pub(crate) async fn open_within<F: Fabric + Clock>(
    fabric: &F,
    nodes: u32,
    name: &str,
    patience: Duration,
) -> Result<Members, StoreError> {
    if nodes == 1 {
        return Ok(Members::one(NodeId(0), fetch(fabric, NodeId(0), name).await?));
    }
    let mut error = StoreError::BeingCreated { name: name.to_owned() };
    let (until, mut rounds) = (fabric.now() + patience, 0..ROUNDS);
    while let Some(round) = rounds.next() {
        if round > 0 {
            fabric.sleep(PAUSE * (1 << round)).await;
        }
        let survey = Survey::of(fabric, nodes, name).await?;
        match survey.settle(fabric, Unfinished::Commit).await? {
            Standing::Here(group) => match group.opened(fabric, &survey).await {
                Ok(Ok(members)) => return Ok(members),
                Ok(Err(changed)) => error = changed,
                // No member serves the store until the replacement is complete.
                Err(being_replaced @ StoreError::BeingReplaced { .. }) if !patience.is_zero() => {
                    error = being_replaced;
                    if fabric.now() < until {
                        rounds = ROUNDS - 1..ROUNDS;
                    }
                }
                Err(other) => return Err(other),
            },
            Standing::Alone(node) => {
                let session = fabric.session_number(node);
                let store = fetch(fabric, node, name).await?;
                // The store may have been dropped, and one with several members created, since the survey.
                if store.membership.is_none() {
                    return Ok(Members::granted(node, session, store));
                }
            }
            Standing::Absent => return Err(survey.absent()),
            Standing::Changed => {}
            Standing::Undecided => error = StoreError::BeingCreated { name: name.to_owned() },
        }
    }
    Err(error)
}

/// What a drop does if the node of the first member, which decides, does not answer or is not in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WithoutFirst {
    /// Changes nothing.
    Refuse,
    /// Drops the other members, because that node is gone for good. If it comes back, the store has lost the memory of
    /// the others.
    Forget,
}

/// Drops the store called `name`, or aborts its creation. Returns the nodes that hold members and did not answer: their
/// memory is freed when a client next meets them.
///
/// # Errors
/// [`StoreError`]. Nothing was changed, except if the error is a [`farside_remote::FabricError`] whose `ran` is
/// [`farside_remote::fabric::Ran::Unknown`]: then the store may have been dropped.
pub async fn drop_store<F: Fabric + Clock>(
    fabric: &F,
    nodes: u32,
    name: &str,
    without_first: WithoutFirst,
) -> Result<Vec<NodeId>, StoreError> {
    if nodes == 1 {
        let found = Survey::of(fabric, nodes, name).await?;
        if found.groups.is_empty() {
            ask(fabric, NodeId(0), &Ask::DropStore { name: name.to_owned() }).await?;
            return Ok(Vec::new());
        }
    }
    let mut was_unfinished = false;
    for round in 0..ROUNDS {
        if round > 0 {
            fabric.sleep(PAUSE * (1 << round)).await;
        }
        let survey = Survey::of(fabric, nodes, name).await?;
        was_unfinished |= !survey.groups.is_empty();
        let unfinished = match without_first {
            WithoutFirst::Refuse => Unfinished::Abort,
            WithoutFirst::Forget => Unfinished::Forget,
        };
        match survey.settle(fabric, unfinished).await? {
            Standing::Here(group) => return group.dropped(fabric, &survey, without_first).await,
            Standing::Alone(node) => {
                ask(fabric, node, &Ask::DropStore { name: name.to_owned() }).await?;
                return Ok(Vec::new());
            }
            Standing::Absent if was_unfinished => return Ok(Vec::new()),
            Standing::Absent => return Err(survey.absent()),
            Standing::Changed | Standing::Undecided => {}
        }
    }
    Err(StoreError::BeingCreated { name: name.to_owned() })
}

/// Lists the names of the stores in a pool of `nodes` nodes, sorted, and the nodes that did not answer.
///
/// # Errors
/// No node has answered.
pub async fn names<F: Fabric + Clock>(
    fabric: &F,
    nodes: u32,
) -> Result<(BTreeSet<String>, Vec<(NodeId, StoreError)>), StoreError> {
    let listed = all((0..nodes).map(NodeId).map(|node| async move {
        match ask(fabric, node, &Ask::ListStores).await {
            Ok(Answer::Stores(stores)) => Ok(stores),
            Ok(_) => Err((node, not_understood(node))),
            Err(error) => Err((node, error)),
        }
    }))
    .await;
    let (mut names, mut silent) = (BTreeSet::new(), Vec::new());
    for answer in listed {
        match answer {
            Ok(stores) => names.extend(stores.into_iter().map(|store| store.name)),
            Err(unanswered) => silent.push(unanswered),
        }
    }
    match silent.first() {
        Some((_, error)) if silent.len() == nodes as usize => Err(error.clone()),
        _ => Ok((names, silent)),
    }
}

/// Completes the unfinished creations and drops of the store called `name` in a pool of `nodes` nodes. Returns what it
/// did; `None` if nothing was unfinished. An attempt that cannot be decided now, since its first member does not answer
/// or has lost its memory, or since the pool lacks one of its nodes, is left as it is.
///
/// An attempt that is PREPARED at some members only may belong to a client that is still creating the store. It is
/// aborted if it is the same after `patience`.
pub async fn settle<F: Fabric + Clock>(
    fabric: &F,
    nodes: u32,
    name: &str,
    patience: Duration,
) -> Option<Settled> {
    let mut settled = Settled { name: name.to_owned(), members: 0, held: 0, end: End::Aborted };
    let left = |settled, error| Some(Settled { end: End::Left(error), ..settled });
    let (mut attempt, mut was_committed) = (None, false);
    let (mut was_unfinished, mut is_undecided) = (false, false);
    let mut waited_for = BTreeSet::new();
    for round in 0..ROUNDS {
        if round > 0 {
            fabric.sleep(PAUSE * (1 << round)).await;
        }
        let mut survey = match Survey::of(fabric, nodes, name).await {
            Ok(survey) => survey,
            Err(error) => return left(settled, error),
        };
        let news = |survey: &Survey, waited_for: &BTreeSet<Attempt>| {
            let half_prepared = survey.groups.iter().filter(|group| group.is_half_prepared());
            half_prepared.map(|group| group.attempt).find(|attempt| !waited_for.contains(attempt))
        };
        if !patience.is_zero()
            && let Some(new) = news(&survey, &waited_for)
        {
            waited_for.insert(new);
            fabric.sleep(patience).await;
            survey = match Survey::of(fabric, nodes, name).await {
                Ok(survey) => survey,
                Err(error) => return left(settled, error),
            };
            if news(&survey, &waited_for).is_some() {
                is_undecided = true;
                continue;
            }
        }
        if !was_unfinished && let Some(group) = survey.groups.iter().find(|group| group.is_unfinished()) {
            attempt = Some(group.attempt);
            settled.members = group.places.len() as u32;
            settled.held = group.states().count() as u32;
            was_committed = group.has_committed();
        }
        let standing = survey.settle(fabric, Unfinished::Decide).await;
        is_undecided = matches!(standing, Ok(Standing::Undecided));
        match standing {
            Ok(Standing::Changed) => was_unfinished = true,
            Ok(Standing::Undecided) => {}
            Ok(standing) if was_unfinished => {
                let is_there = survey.groups.iter().any(|group| Some(group.attempt) == attempt);
                settled.end = match standing {
                    Standing::Here(_) if is_there => End::Created,
                    _ if was_committed => End::Dropped,
                    _ => End::Aborted,
                };
                return Some(settled);
            }
            Ok(_) => return None,
            Err(error) => return left(settled, error),
        }
    }
    let error = StoreError::BeingCreated { name: name.to_owned() };
    if was_unfinished || is_undecided { left(settled, error) } else { None }
}

/// Fetches the description of one member of an open store again, since its node did not answer before, or its part of
/// the store seems to be gone. Tells the member that the store is committed if it missed that.
///
/// # Errors
/// [`StoreError`]: the member has lost its memory, the store was dropped, or the node does not answer.
pub(crate) async fn fetch_member<F: Fabric>(
    fabric: &F,
    members: &Members,
    index: usize,
) -> Result<Members, StoreError> {
    let (mut node, is_guess) = match &members.list()[index] {
        Member { store: Err(lost @ StoreError::MemoryLost { .. }), .. } => return Err(lost.clone()),
        Member { node, store, .. } => (*node, store.is_err()),
    };
    let Store { name, membership, .. } = members.store();
    let Some(of) = membership else {
        let session = fabric.session_number(node);
        let store = fetch(fabric, node, name).await?;
        return if store.is(members.store()) {
            Ok(Members::granted(node, session, store))
        } else {
            Err(StoreError::another(&store))
        };
    };
    let lost = |node| {
        let loss = Loss::of(members.store(), 1);
        StoreError::MemoryLost { name: name.clone(), member: index as u32, node, loss }
    };
    let dropped = || StoreError::Gone(format!("store '{name}' was dropped: open another"));
    let being_replaced = || StoreError::BeingReplaced { name: name.clone() };
    let is_same = |store: &Store| {
        let own = store.membership.as_ref();
        own.is_some_and(|own| {
            own.attempt == of.attempt
                && own.configuration == of.configuration
                && own.members == of.members
                && own.index as usize == index
        })
    };
    let may_be_replaced = may_be_replaced(&members.store().kind);
    let incarnation = of.members[index].incarnation;
    let mut found = find(fabric, node, name).await;
    if is_guess && found.as_ref().map_or(true, |found| found.incarnation != incarnation) {
        // The node did not answer when the store was opened, so it may be another one than the member's. If it does not
        // answer now, the member's own node may.
        let survey = Survey::ask(fabric, members.nodes(), name).await?;
        if may_be_replaced && let Some(left) = survey.left(of) {
            return Err(left);
        }
        let group = survey.group(of);
        match group.places[index] {
            Place::Holds(holder, _) | Place::Behind(holder) => node = holder,
            // The others may have answered before the member was replaced: ask them again below.
            Place::Lacks(holder) if may_be_replaced => node = holder,
            Place::Lacks(_) => return Err(dropped()),
            Place::Silent(silent) => return Err(group.silent(&survey, silent)),
            Place::Lost(_) if mutants::WIPED_MEMBER_ABSENT.is_on() => return Err(dropped()),
            Place::Lost(node) => return Err(group.lost(&survey, index, node)),
            Place::Elsewhere => return Err(group.too_few(&survey)),
        }
        found = find(fabric, node, name).await;
    }
    let found = found?;
    if found.incarnation != incarnation && !mutants::WIPED_MEMBER_ABSENT.is_on() {
        // A member that was lost may have been replaced since, and others after it. Those that know may be the ones
        // that did not answer.
        if named(&members.store().kind).is_some_and(|system| system.replaces_members) {
            let survey = Survey::ask_for_next(fabric, members.nodes(), name, of).await?;
            if let Some(left) = survey.left(of) {
                return Err(left);
            }
            // While a majority serves the configuration, no later one exists, and nobody knows more.
            let serves = |found: &&Membership| {
                (found.attempt, found.configuration) == (of.attempt, of.configuration)
                    && found.state == MemberState::Committed
            };
            let is_current = 2 * survey.memberships().filter(serves).count() > of.members.len();
            let may_know = survey.found.iter().any(Result::is_err);
            if !is_current && may_know && !mutants::LOST_WHILE_OTHERS_SILENT.is_on() {
                return Err(being_replaced());
            }
        }
        return Err(lost(node));
    }
    let held = match found.store.filter(|store| store.identity() == of.attempt) {
        Some(held) if is_same(&held) && !matches!(state_of(&held), Some(MemberState::Revoked)) => held,
        other if may_be_replaced => {
            let is_below = |held: &Store| {
                held.membership.as_ref().is_some_and(|held| held.configuration < of.configuration)
            };
            // The members of the current configuration know whether this one is over.
            let survey = Survey::ask_for_next(fabric, members.nodes(), name, of).await?;
            let is_anyone_silent = survey.found.iter().any(Result::is_err);
            return Err(match (survey.left(of), other) {
                (Some(left), _) => left,
                (None, Some(held)) if is_same(&held) || is_below(&held) => being_replaced(),
                // Those that know of the replacement of this member may be the ones that did not answer.
                (None, _) if is_anyone_silent => being_replaced(),
                (None, _) => dropped(),
            });
        }
        _ => return Err(dropped()),
    };
    if held.is_prepared() {
        let decision = Decision::Commit;
        ask(fabric, node, &Ask::Decide { name: name.clone(), attempt: of.attempt, decision }).await?;
    }
    let session = fabric.session_number(node);
    match fetch(fabric, node, name).await {
        Ok(store) if is_same(&store) => Ok(Members::part(node, session, store)),
        // The member's configuration may have ended since it was found: look again.
        Ok(_) | Err(StoreError::Gone(_)) if may_be_replaced => Err(being_replaced()),
        Ok(_) => Err(dropped()),
        Err(error) => Err(error),
    }
}

/// Describes the members of a store of replicas, without their keys: no member may give clients one.
///
/// # Errors
/// [`StoreError`]: no member was found.
pub(crate) async fn describe<F: Fabric>(fabric: &F, nodes: u32, name: &str) -> Result<Members, StoreError> {
    let survey = Survey::ask(fabric, nodes, name).await?;
    let of = survey.memberships().max_by_key(|of| (of.state != MemberState::Joining, of.configuration));
    let Some(of) = of else { return Err(survey.absent()) };
    let group = survey.group(of);
    let described = group.places.iter().enumerate().map(|(index, place)| {
        let found = place.holder().and_then(|node| survey.found.get(node.0 as usize)?.as_ref().ok());
        let (node, store) = match (place, found.and_then(|found| found.store.clone())) {
            (Place::Holds(node, _), Some(store)) => (*node, Ok(store)),
            (Place::Silent(node), _) => (*node, Err(group.silent(&survey, *node))),
            (Place::Lost(node) | Place::Lacks(node), _) => (*node, Err(group.lost(&survey, index, *node))),
            (Place::Holds(node, _) | Place::Behind(node), _) => {
                (*node, Err(StoreError::BeingReplaced { name: name.to_owned() }))
            }
            (Place::Elsewhere, _) => (NodeId(0), Err(group.too_few(&survey))),
        };
        Member { node, session: 0, store }
    });
    Members::of(described.collect(), nodes)
}

/// Opens the store that `members` describe again, in its current configuration. Returns `None` if that is the one of
/// `members`.
///
/// # Errors
/// [`StoreError`].
pub(crate) async fn reopen<F: Fabric + Clock>(
    fabric: &F,
    members: &Members,
) -> Result<Option<Members>, StoreError> {
    let Store { name, membership: Some(of), .. } = members.store() else { return Ok(None) };
    let survey = Survey::ask_for_next(fabric, members.nodes(), name, of).await?;
    if survey.left(of).is_none() {
        return Ok(None);
    }
    survey.group(of).opened(fabric, &survey).await?.map(Some)
}

/// Whether the members of stores of this kind are replicas.
fn are_replicas(kind: &str) -> bool {
    named(kind).is_some_and(|system| system.nodes == Nodes::Replicas)
}

/// Whether members of stores of this kind may be replaced, now or by another release.
fn may_be_replaced(kind: &str) -> bool {
    are_replicas(kind) || named(kind).is_some_and(|system| system.replaces_members)
}

fn state_of(store: &Store) -> Option<MemberState> {
    store.membership.as_ref().map(|membership| membership.state)
}
