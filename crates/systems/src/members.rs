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
//! A store of replicas has *configurations*: numbered lists of members. Module `configuration` changes them. The
//! current configuration is the highest that a member serves or has served. A member that missed it is *behind*.
//!
//! Invariant: no key of a member that is not COMMITTED is given to any client.
//! Invariant: members of two attempts are never in one list.
//! Invariant: a member that has lost its memory is an error of its own, never a missing store.
//! Invariant: a member counts as lost only if the node that held it has another memory, or if all nodes have answered.

pub(crate) mod configuration;

use crate::mutants;
use crate::registry::named;
use crate::store::{Loss, Member, Members, StoreError, fetch};
use crate::system::{Nodes, Sizing};
use farside_remote::arena::SEGMENT_SIZE;
use farside_remote::clock::Clock;
pub(crate) use farside_remote::control::MemberId;
use farside_remote::control::{
    Answer, Ask, Attempt, Decided, Decision, Found, MEMBERS_MAX, MemberState, Membership, Store,
};
use farside_remote::fabric::{DEADLINE, Ran};
use farside_remote::{Fabric, FabricError, NodeId};
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

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
    if nodes == 1 {
        return Ok(Members::one(NodeId(0), fetch(fabric, NodeId(0), name).await?));
    }
    let mut error = StoreError::BeingCreated { name: name.to_owned() };
    let (until, mut rounds) = (fabric.now() + DEADLINE, 0..ROUNDS);
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
                Err(being_replaced @ StoreError::BeingReplaced { .. }) => {
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
            tell_all(fabric, &name, attempt, Decision::Abort, &chosen[1..]).await;
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
/// [`StoreError`]. Nothing was changed, except if the error is a [`FabricError`] whose [`FabricError::ran`] is
/// [`Ran::Unknown`]: then the store may have been dropped.
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
        let is_same = store.identity() == members.store().identity();
        return if is_same {
            Ok(Members::granted(node, session, store))
        } else {
            Err(StoreError::another(&store))
        };
    };
    let lost = |node| {
        let loss = Loss::of_one(&members.store().kind);
        StoreError::MemoryLost { name: name.clone(), member: index as u32, node, loss }
    };
    let dropped = || StoreError::Gone(format!("store '{name}' was dropped: open another"));
    let is_same = |store: &Store| {
        let own = store.membership.as_ref();
        own.is_some_and(|own| {
            own.attempt == of.attempt
                && own.configuration == of.configuration
                && own.members == of.members
                && own.index as usize == index
        })
    };
    let are_replicas = are_replicas(&members.store().kind);
    let incarnation = of.members[index].incarnation;
    let mut found = find(fabric, node, name).await;
    if is_guess && found.as_ref().map_or(true, |found| found.incarnation != incarnation) {
        // The node did not answer when the store was opened, so it may be another one than the member's. If it does not
        // answer now, the member's own node may.
        let survey = Survey::ask(fabric, members.nodes(), name).await?;
        if are_replicas && let Some(left) = survey.left(of) {
            return Err(left);
        }
        let group = survey.group(of);
        match group.places[index] {
            Place::Holds(holder, _) | Place::Behind(holder) => node = holder,
            // The others may have answered before the member was replaced: ask them again below.
            Place::Lacks(holder) if are_replicas => node = holder,
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
        // A member that was lost may have been replaced since, and others after it.
        if are_replicas
            && let Some(left) = Survey::ask_for_next(fabric, members.nodes(), name, of).await?.left(of)
        {
            return Err(left);
        }
        return Err(lost(node));
    }
    let held = match found.store.filter(|store| store.identity() == of.attempt) {
        Some(held) if is_same(&held) && !matches!(state_of(&held), Some(MemberState::Revoked)) => held,
        other if are_replicas => {
            let is_below = |held: &Store| {
                held.membership.as_ref().is_some_and(|held| held.configuration < of.configuration)
            };
            // The members of the current configuration know whether this one is over.
            let survey = Survey::ask_for_next(fabric, members.nodes(), name, of).await?;
            let being_replaced = || StoreError::BeingReplaced { name: name.clone() };
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
        Ok(_) | Err(StoreError::Gone(_)) if are_replicas => {
            Err(StoreError::BeingReplaced { name: name.clone() })
        }
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

fn state_of(store: &Store) -> Option<MemberState> {
    store.membership.as_ref().map(|membership| membership.state)
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
    let distribution = named(kind).map(|system| system.nodes);
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

/// Treatment of an attempt that is not decided.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unfinished {
    /// Commits the attempt if it is PREPARED at all members, and otherwise leaves it to its creator.
    Commit,
    /// Commits the attempt if it is PREPARED at all members, and otherwise aborts it.
    Decide,
    /// Aborts the attempt.
    Abort,
    /// Aborts the attempt, also if the first member's node does not answer or is not in the pool.
    Forget,
}

/// What a pool has under a name.
enum Standing<'a> {
    /// A committed store with several members.
    Here(&'a Group),
    /// A store on one node.
    Alone(NodeId),
    /// No node that has answered has a store of this name.
    Absent,
    /// An attempt was decided, or a member was told of a decision: look again.
    Changed,
    /// Another client is creating the store.
    Undecided,
}

/// Responses of all nodes about a name.
struct Survey {
    name: String,
    found: Vec<Result<Found, FabricError>>,
    groups: Vec<Group>,
    /// Whether an attempt was too new to be judged.
    is_moving: bool,
}

/// Members of one attempt that were found.
struct Group {
    attempt: Attempt,
    /// The current configuration, and its members.
    configuration: u64,
    members: Vec<MemberId>,
    /// Node and state of each member, by index.
    places: Vec<Place>,
    /// Nodes with other members of the attempt, which were replaced or have not joined.
    others: Vec<(NodeId, Membership)>,
    /// All nodes with members of the attempt, and what they hold.
    held: Vec<(NodeId, Membership)>,
    /// Whether the members are replicas, which may be replaced.
    are_replicas: bool,
}

/// What is known about a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The node holds the member in this state.
    Holds(NodeId, MemberState),
    /// The node holds the member, which does not serve the current configuration yet.
    Behind(NodeId),
    /// The node's memory is that of the member, and it lacks the attempt.
    Lacks(NodeId),
    /// The node that probably holds the member did not answer.
    Silent(NodeId),
    /// The node that held the member has another memory.
    Lost(NodeId),
    /// No node of the pool holds the member.
    Elsewhere,
}

impl Place {
    fn holder(&self) -> Option<NodeId> {
        match self {
            Place::Holds(node, _) | Place::Behind(node) => Some(*node),
            _ => None,
        }
    }
}

impl Survey {
    /// Asks all nodes at the same time, and asks again if any has a member of a store.
    ///
    /// The nodes answer at different times: one may answer before the attempt is prepared there, and another after. So
    /// the absence of an attempt is known only from answers to questions that were asked after a member was seen.
    async fn of<F: Fabric>(fabric: &F, nodes: u32, name: &str) -> Result<Survey, StoreError> {
        let before = Survey::ask(fabric, nodes, name).await?;
        if before.memberships().next().is_none() || mutants::ABSENCE_SEEN_TOO_EARLY.is_on() {
            return Ok(before.grouped(None));
        }
        Ok(Survey::ask(fabric, nodes, name).await?.grouped(Some(&before)))
    }

    async fn ask<F: Fabric>(fabric: &F, nodes: u32, name: &str) -> Result<Survey, StoreError> {
        Survey::ask_until(fabric, nodes, name, |_| false).await
    }

    /// Asks all nodes about a member of a configuration, until a majority of the members of a higher one have answered
    /// that they serve it. A node that does not answer then delays no client.
    async fn ask_for_next<F: Fabric>(
        fabric: &F,
        nodes: u32,
        name: &str,
        of: &Membership,
    ) -> Result<Survey, StoreError> {
        let serving = |answer: &Result<Answer, FabricError>| match answer {
            Ok(Answer::Found(Found { store: Some(store), .. })) => {
                store.membership.as_ref().is_some_and(|found| {
                    found.attempt == of.attempt
                        && found.configuration > of.configuration
                        && found.state == MemberState::Committed
                })
            }
            _ => false,
        };
        let majority = of.members.len() / 2 + 1;
        Survey::ask_until(fabric, nodes, name, |answers| {
            answers.iter().flatten().filter(|answer| serving(answer)).count() >= majority
        })
        .await
    }

    async fn ask_until<F: Fabric>(
        fabric: &F,
        nodes: u32,
        name: &str,
        is_enough: impl Fn(&[Option<Result<Answer, FabricError>>]) -> bool,
    ) -> Result<Survey, StoreError> {
        let request = Ask::FindStore { name: name.to_owned() };
        let asked = (0..nodes).map(|node| raw_ask(fabric, NodeId(node), &request));
        let unanswered = |node| FabricError::Lost {
            node,
            ran: Ran::No,
            reason: "its answer was not awaited, since enough others have answered".into(),
        };
        let answers = wait_for(asked, is_enough).await.into_iter().zip((0..).map(NodeId));
        let answers = answers.map(|(answer, node)| answer.unwrap_or_else(|| Err(unanswered(node))));
        let mut survey =
            Survey { name: name.to_owned(), found: Vec::new(), groups: Vec::new(), is_moving: false };
        for (node, answer) in (0..).map(NodeId).zip(answers) {
            let found = match answer {
                // The token of this client may give it the store on other nodes only.
                Err(refused @ FabricError::Refused(_)) => Err(refused),
                answer => match understood(node, name, answer) {
                    Err(StoreError::Fabric(error)) => Err(error.map_ran(|_| Ran::No)),
                    understood => Ok(understood?),
                },
            };
            survey.found.push(found);
        }
        let mut nodes_of = BTreeMap::new();
        for (node, found) in survey.found.iter().enumerate() {
            let Ok(found) = found else { continue };
            if let Some(other) = nodes_of.insert(found.incarnation, node) {
                return Err(StoreError::Gone(format!(
                    "the nodes {other} and {node} of the pool are one node: name each node once in --pool"
                )));
            }
        }
        // Members that contradict each other must not seem to be an aborted attempt, whose members would be removed.
        let mut lists = BTreeMap::new();
        for (node, found) in (0..).map(NodeId).zip(&survey.found) {
            let store = found.as_ref().ok().and_then(|found| found.store.as_ref());
            let Some(membership) = store.and_then(|store| store.membership.as_ref()) else { continue };
            // Several recoverers may have chosen different newcomers.
            if membership.state == MemberState::Joining {
                continue;
            }
            if *lists.entry((membership.attempt, membership.configuration)).or_insert(&membership.members)
                != &membership.members
            {
                return Err(not_understood(node));
            }
        }
        if survey.found.iter().all(Result::is_err) {
            return Err(survey.absent());
        }
        Ok(survey)
    }

    /// Groups the members by their attempts. An attempt, or its commitment, that `before` does not show is too new to
    /// be judged.
    fn grouped(mut self, before: Option<&Survey>) -> Survey {
        let mut groups: Vec<Group> = Vec::new();
        let mut is_moving = false;
        for membership in self.memberships() {
            if groups.iter().any(|group| group.attempt == membership.attempt) {
                continue;
            }
            let group = self.group(membership);
            let is_lacking = group.places.iter().any(|place| matches!(place, Place::Lacks(_)));
            let is_committed = group.has_committed();
            let is_seen = before.is_none_or(|before| {
                before
                    .memberships()
                    .any(|seen| group.is(seen) && (!is_committed || seen.state != MemberState::Prepared))
            });
            // A replaced member is dropped, and others may have answered before it was replaced. If they have answered
            // after its absence was seen, it was not replaced.
            let was_lacking = || {
                let before = before.map(|before| before.group(membership).places);
                let before = before.as_ref().unwrap_or(&group.places);
                let lacks = |place: &Place| matches!(place, Place::Lacks(_));
                group.places.iter().zip(before).all(|(now, before)| !lacks(now) || lacks(before))
            };
            let may_be_replaced = group.are_replicas && group.is_begun() && !was_lacking();
            is_moving |= is_lacking && (!is_seen || may_be_replaced);
            groups.push(group);
        }
        (self.groups, self.is_moving) = (groups, is_moving);
        self
    }

    /// Chooses `members` nodes for a new store: those with the largest hashes of the placement's name and of their
    /// memory's incarnation, after the ones to skip, in the order of the pool.
    ///
    /// # Errors
    /// A node has not answered.
    fn chosen(&self, members: usize, at: Placement<'_>) -> Result<Vec<MemberId>, StoreError> {
        let mut ids = Vec::new();
        for (node, found) in (0..).zip(&self.found) {
            let found = found.as_ref().map_err(|error| StoreError::Fabric(error.clone()))?;
            ids.push(MemberId { node, incarnation: found.incarnation });
        }
        let hash =
            |id: &MemberId| rapidhash_v3_seeded(at.name.as_bytes(), &RapidSecrets::seed(id.incarnation));
        ids.sort_by_key(|id| std::cmp::Reverse(hash(id)));
        ids.drain(..at.skip.min(ids.len()));
        ids.truncate(members);
        ids.sort_by_key(|id| id.node);
        Ok(ids)
    }

    fn memberships(&self) -> impl Iterator<Item = &Membership> {
        self.found.iter().flatten().filter_map(|found| found.store.as_ref()?.membership.as_ref())
    }

    /// The membership of this attempt with the highest configuration that a member serves or has served. If only
    /// members were found that join one, that of such a member.
    fn current(&self, attempt: Attempt) -> Option<&Membership> {
        let of_attempt = self.memberships().filter(|membership| membership.attempt == attempt);
        of_attempt.max_by_key(|of| (of.state != MemberState::Joining, of.configuration))
    }

    /// Returns an error if the configuration of `of` is over; or if a node that did not answer may know a higher one,
    /// and no node that answered knows this one.
    fn left(&self, of: &Membership) -> Option<StoreError> {
        let current = self.current(of.attempt).filter(|current| current.state != MemberState::Joining);
        match current {
            Some(current) if current.configuration > of.configuration => {
                Some(StoreError::Replaced { name: self.name.clone() })
            }
            Some(_) => None,
            None => self.found.iter().find_map(|found| found.as_ref().err()).cloned().map(StoreError::Fabric),
        }
    }

    /// Finds the places of all members of the current configuration of an attempt, or of `of` if none was found.
    fn group(&self, of: &Membership) -> Group {
        let of = self.current(of.attempt).unwrap_or(of);
        let nodes = || (0..).map(NodeId).zip(&self.found);
        let is_member = |found: &Found| of.members.iter().any(|id| id.incarnation == found.incarnation);
        let place = |id: &MemberId| {
            let own = nodes().find_map(|(node, found)| {
                found
                    .as_ref()
                    .ok()
                    .filter(|found| found.incarnation == id.incarnation)
                    .map(|found| (node, found))
            });
            if let Some((node, found)) = own {
                let held = found.store.as_ref().and_then(|store| store.membership.as_ref());
                let is_of = |held: &&Membership| {
                    let is_served = held.state != MemberState::Joining;
                    let is_another = held.configuration == of.configuration && held.members != of.members;
                    held.attempt == of.attempt && !(is_served && is_another)
                };
                return match held.filter(is_of) {
                    Some(held) if held.state == MemberState::Joining => Place::Behind(node),
                    Some(held) if held.configuration == of.configuration => Place::Holds(node, held.state),
                    Some(_) => Place::Behind(node),
                    None => Place::Lacks(node),
                };
            }
            // The hint first, since the client that created the store probably listed the nodes in the same order.
            let mut by_hint: Vec<_> = nodes().collect();
            by_hint.sort_by_key(|(node, _)| node.0 != id.node);
            // A member is lost only if every node has answered: its node may have another place in this pool than the
            // hint says, and be silent.
            if let Some((node, _)) = by_hint.iter().find(|(_, found)| found.is_err()) {
                return Place::Silent(*node);
            }
            let other = by_hint.iter().find(|(_, found)| found.as_ref().is_ok_and(|found| !is_member(found)));
            other.map_or(Place::Elsewhere, |(node, _)| Place::Lost(*node))
        };
        let places = of.members.iter().map(place).collect();
        let of_attempt = |store: &&Store| {
            store.membership.as_ref().is_some_and(|membership| membership.attempt == of.attempt)
        };
        let held = |found: &Found| found.store.as_ref().filter(of_attempt)?.membership.clone();
        let others = nodes().filter_map(|(node, found)| {
            let found = found.as_ref().ok().filter(|found| !is_member(found))?;
            Some((node, held(found)?))
        });
        let mut stores = self.found.iter().flatten().filter_map(|found| found.store.as_ref());
        let are_replicas = stores.find(of_attempt).is_some_and(|store| are_replicas(&store.kind));
        Group {
            attempt: of.attempt,
            configuration: of.configuration,
            members: of.members.clone(),
            places,
            others: others.collect(),
            held: nodes().filter_map(|(node, found)| Some((node, held(found.as_ref().ok()?)?))).collect(),
            are_replicas,
        }
    }

    /// Decides on unfinished attempts as `unfinished` says, and tells members of decisions that they missed.
    async fn settle<F: Fabric + Clock>(
        &self,
        fabric: &F,
        unfinished: Unfinished,
    ) -> Result<Standing<'_>, StoreError> {
        if self.is_moving {
            return Ok(Standing::Undecided);
        }
        let alone = (0..).map(NodeId).zip(&self.found).filter(|(_, found)| {
            let store = found.as_ref().ok().and_then(|found| found.store.as_ref());
            store.is_some_and(|store| store.membership.is_none())
        });
        let mut standing: Vec<Standing<'_>> = alone.map(|(node, _)| Standing::Alone(node)).collect();
        let mut is_undecided = false;
        let mut error = None;
        for group in &self.groups {
            match group.settle(fabric, self, unfinished).await {
                Ok(Standing::Changed) => return Ok(Standing::Changed),
                Ok(Standing::Undecided) => is_undecided = true,
                Ok(Standing::Absent) => {}
                Ok(here) => standing.push(here),
                Err(of_group) => error = Some(of_group),
            }
        }
        if standing.len() > 1 {
            return Err(StoreError::Gone(format!(
                "the nodes of the pool hold {} different stores '{}': name only the nodes of one of them in --pool",
                standing.len(),
                self.name
            )));
        }
        match (standing.pop(), error) {
            (Some(here), _) => Ok(here),
            (None, Some(error)) => Err(error),
            (None, None) if is_undecided => Ok(Standing::Undecided),
            // A node that does not answer may hold the store.
            (None, None) if self.found.iter().any(Result::is_err) => Err(self.absent()),
            (None, None) => Ok(Standing::Absent),
        }
    }

    /// Error for a name that no node has: the store is missing only if all nodes have answered.
    fn absent(&self) -> StoreError {
        match self.found.iter().find_map(|found| found.as_ref().err()) {
            Some(FabricError::Refused(reason)) => StoreError::Gone(reason.clone()),
            Some(error) => StoreError::Fabric(error.clone()),
            None => StoreError::Gone(format!(
                "there is no store '{0}' in the pool: create it with 'farside store create {0}'",
                self.name
            )),
        }
    }
}

impl Group {
    fn is(&self, membership: &Membership) -> bool {
        self.attempt == membership.attempt
            && self.configuration == membership.configuration
            && self.members == membership.members
    }

    fn states(&self) -> impl Iterator<Item = MemberState> {
        self.places.iter().filter_map(|place| match place {
            Place::Holds(_, state) => Some(*state),
            _ => None,
        })
    }

    /// Whether the attempt is PREPARED at its first member, and not at all members.
    fn is_half_prepared(&self) -> bool {
        matches!(self.places[0], Place::Holds(_, MemberState::Prepared))
            && self.states().count() < self.places.len()
    }

    /// Whether a client has begun to create or drop the store and not ended.
    fn is_unfinished(&self) -> bool {
        let is_absent = self.places.iter().any(|place| matches!(place, Place::Lacks(_)));
        is_absent || self.states().any(|state| state == MemberState::Prepared)
    }

    /// Whether a member was found that serves or has served the configuration.
    fn has_committed(&self) -> bool {
        self.states().any(|state| state != MemberState::Prepared)
    }

    /// Whether any member was found that is not PREPARED, so that members may be replaced.
    fn is_begun(&self) -> bool {
        self.held.iter().any(|(_, of)| of.state != MemberState::Prepared)
    }

    /// Nodes that hold a PREPARED member.
    fn prepared(&self) -> Vec<NodeId> {
        let held = self.places.iter().filter_map(|place| match place {
            Place::Holds(node, MemberState::Prepared) => Some(*node),
            _ => None,
        });
        held.collect()
    }

    /// Nodes that hold any member of the attempt.
    fn holders(&self) -> Vec<NodeId> {
        let others = self.others.iter().map(|(node, _)| *node);
        self.places.iter().filter_map(Place::holder).chain(others).collect()
    }

    fn lost(&self, survey: &Survey, member: usize, node: NodeId) -> StoreError {
        let lost = self.places.iter().filter(|place| matches!(place, Place::Lost(_))).count();
        // A description of the store is at a member that has its memory.
        let kind = survey.found.iter().flatten().find_map(|found| Some(&found.store.as_ref()?.kind));
        let loss = match kind.map_or(Loss::Items, |kind| Loss::of_one(kind)) {
            Loss::Replaceable | Loss::Irreplaceable if 2 * lost > self.places.len() => Loss::Majority,
            loss => loss,
        };
        StoreError::MemoryLost { name: survey.name.clone(), member: member as u32, node, loss }
    }

    async fn settle<F: Fabric + Clock>(
        &self,
        fabric: &F,
        survey: &Survey,
        unfinished: Unfinished,
    ) -> Result<Standing<'_>, StoreError> {
        let name = &survey.name;
        let is_everywhere = self.states().count() == self.places.len();
        let (has_committed, is_dropped) =
            (self.has_committed(), self.places.iter().any(|place| matches!(place, Place::Lacks(_))));
        let state = match self.places[0] {
            // Only newcomers were found. The members before them know whether the store exists.
            _ if self.states().next().is_none() && is_dropped => MemberState::Aborted,
            Place::Behind(_) if !has_committed && unfinished != Unfinished::Forget => {
                return Err(self.unknown(survey));
            }
            Place::Behind(_) => MemberState::Committed,
            Place::Holds(node, MemberState::Prepared) => {
                let decision = match unfinished {
                    Unfinished::Abort | Unfinished::Forget => Decision::Abort,
                    _ if is_everywhere => Decision::Commit,
                    // Another client, which has all nodes in its pool, may find the attempt PREPARED everywhere.
                    Unfinished::Decide if self.places.contains(&Place::Elsewhere) => {
                        return Err(self.too_few(survey));
                    }
                    Unfinished::Decide => Decision::Abort,
                    Unfinished::Commit => return Ok(Standing::Undecided),
                };
                decide(fabric, node, name, self.attempt, decision, self.members[0].incarnation).await?;
                return Ok(Standing::Changed);
            }
            Place::Holds(_, _) => MemberState::Committed,
            Place::Lacks(_) => MemberState::Aborted,
            // An attempt that is committed anywhere was prepared everywhere. A living member that lacks it now was told
            // that it was dropped.
            _ if has_committed && is_dropped => MemberState::Aborted,
            Place::Silent(_) | Place::Lost(_) | Place::Elsewhere if has_committed => MemberState::Committed,
            Place::Lost(_) if mutants::WIPED_MEMBER_ABSENT.is_on() => return Ok(Standing::Absent),
            // The first member may have committed the attempt, and lost that decision with data. Only a drop forgets
            // it.
            Place::Lost(_) if unfinished == Unfinished::Abort => return Ok(Standing::Here(self)),
            _ if unfinished == Unfinished::Forget => return Ok(Standing::Here(self)),
            Place::Elsewhere if unfinished == Unfinished::Abort => {
                return Err(self.without_first(survey));
            }
            Place::Lost(node) => return Err(self.lost(survey, 0, node)),
            Place::Silent(node) => return Err(self.silent(survey, node)),
            Place::Elsewhere => return Err(self.too_few(survey)),
        };
        if state == MemberState::Aborted && self.are_replicas && self.is_begun() {
            return Ok(self.leave(fabric, name).await);
        }
        let (decision, uninformed) = match state {
            MemberState::Committed => (Decision::Commit, self.prepared()),
            _ => (Decision::Abort, self.holders()),
        };
        let is_told = state == MemberState::Committed && mutants::HALF_CREATED_USED.is_on();
        if !uninformed.is_empty() && !is_told {
            let silent = tell_all(fabric, name, self.attempt, decision, &uninformed).await;
            return Ok(match (silent.is_empty(), state) {
                (true, _) => Standing::Changed,
                (false, MemberState::Committed) => Standing::Undecided,
                (false, _) => Standing::Absent,
            });
        }
        Ok(if state == MemberState::Committed { Standing::Here(self) } else { Standing::Absent })
    }

    /// Drops what is left of a store of replicas that was dropped: each member that still is what was found. What was
    /// found may be the rest of a replacement, and its node may have joined again since.
    async fn leave<F: Fabric>(&self, fabric: &F, name: &str) -> Standing<'_> {
        let left = all(self.held.iter().map(|(node, membership)| async move {
            let request = Ask::Leave { name: name.to_owned(), membership: membership.clone() };
            raw_ask(fabric, *node, &request).await
        }))
        .await;
        match left.iter().any(|left| matches!(left, Ok(_) | Err(FabricError::Refused(_)))) {
            true => Standing::Changed,
            false => Standing::Absent,
        }
    }

    /// Error of a group of which only newcomers were found.
    fn unknown(&self, survey: &Survey) -> StoreError {
        let places = || self.places.iter().enumerate();
        let silent = places().find_map(|(_, place)| match place {
            Place::Silent(node) => Some(self.silent(survey, *node)),
            _ => None,
        });
        let lost = || {
            places().find_map(|(member, place)| match place {
                Place::Lost(node) => Some(self.lost(survey, member, *node)),
                _ => None,
            })
        };
        silent.or_else(lost).unwrap_or_else(|| self.too_few(survey))
    }

    fn too_few(&self, survey: &Survey) -> StoreError {
        StoreError::Gone(format!(
            "store '{}' has {} members, and only {} of their nodes are in the pool: name all of its nodes in --pool",
            survey.name,
            self.places.len(),
            self.states().count()
        ))
    }

    /// Error of a drop without the first member's node.
    fn without_first(&self, survey: &Survey) -> StoreError {
        StoreError::Gone(format!(
            "store '{0}' has {1} members, and the node of the first, which decides on a drop, is not in the pool: name \
             it in --pool; if it is gone for good, drop the rest with 'farside store drop {0} --forget'",
            survey.name,
            self.places.len()
        ))
    }

    /// Opens a committed store at its members. If a member was dropped meanwhile, or its node refuses to give its key,
    /// returns the inner error: look again.
    async fn opened<F: Fabric>(
        &self,
        fabric: &F,
        survey: &Survey,
    ) -> Result<Result<Members, StoreError>, StoreError> {
        if self.places.contains(&Place::Elsewhere) {
            return Err(self.too_few(survey));
        }
        // The numbers are read before the keys are granted: a session may end before all nodes have answered.
        let session = |place: &Place| place.holder().map_or(0, |node| fabric.session_number(node));
        let places = self.places.iter().map(|place| (place, session(place)));
        let opened = all(places.enumerate().map(|(index, (place, session))| async move {
            let (node, store) = match *place {
                Place::Holds(node, MemberState::Revoked) | Place::Behind(node) => {
                    (node, Err(StoreError::BeingReplaced { name: survey.name.clone() }))
                }
                Place::Holds(node, _) => (node, fetch(fabric, node, &survey.name).await),
                Place::Lacks(node) | Place::Lost(node) if mutants::WIPED_MEMBER_ABSENT.is_on() => {
                    (node, Err(StoreError::Gone(format!("there is no store '{}'", survey.name))))
                }
                Place::Lacks(node) | Place::Lost(node) => (node, Err(self.lost(survey, index, node))),
                Place::Silent(node) => (node, Err(self.silent(survey, node))),
                Place::Elsewhere => (NodeId(0), Err(self.too_few(survey))),
            };
            Member { node, session, store }
        }))
        .await;
        // The store may have been dropped, and another one created, since the survey.
        let is_same = |(index, member): (usize, &Member)| match &member.store {
            Ok(store) => store.membership.as_ref().is_some_and(|own| {
                (self.is(own) && own.index as usize == index) || mutants::MEMBERS_MIXED.is_on()
            }),
            Err(StoreError::Gone(_)) => {
                mutants::WIPED_MEMBER_ABSENT.is_on() || mutants::HALF_CREATED_USED.is_on()
            }
            Err(_) => true,
        };
        if !opened.iter().enumerate().all(is_same) {
            let refused = opened.into_iter().find_map(|member| match member.store {
                Err(refused @ StoreError::Gone(_)) => Some(refused),
                _ => None,
            });
            return Ok(
                Err(refused.unwrap_or_else(|| StoreError::BeingCreated { name: survey.name.clone() })),
            );
        }
        let members = Members::of(opened, survey.found.len() as u32)?;
        let kind = &members.store().kind;
        let is_other = |member: &&Member| member.store.as_ref().is_ok_and(|store| store.kind != *kind);
        match members.list().iter().find(is_other) {
            Some(other) => Err(not_understood(other.node)),
            None => Ok(Ok(members)),
        }
    }

    /// Drops a committed store, or one whose first member is lost. Returns the nodes that did not answer.
    async fn dropped<F: Fabric + Clock>(
        &self,
        fabric: &F,
        survey: &Survey,
        without_first: WithoutFirst,
    ) -> Result<Vec<NodeId>, StoreError> {
        match self.places[0] {
            Place::Holds(node, _) | Place::Behind(node) => {
                let incarnation = self.members[0].incarnation;
                decide(fabric, node, &survey.name, self.attempt, Decision::Drop, incarnation).await?;
            }
            // Nobody can decide any more.
            Place::Lacks(_) | Place::Lost(_) => {}
            _ if without_first == WithoutFirst::Forget => {}
            Place::Silent(node) => return Err(self.silent(survey, node)),
            Place::Elsewhere => return Err(self.without_first(survey)),
        }
        let replaced = self.others.iter().map(|(node, _)| *node);
        let others: Vec<NodeId> = self.places[1..].iter().filter_map(Place::holder).chain(replaced).collect();
        let mut untold = tell_all(fabric, &survey.name, self.attempt, Decision::Drop, &others).await;
        untold.extend(self.places.iter().filter_map(|place| match place {
            Place::Silent(node) => Some(*node),
            _ => None,
        }));
        untold.sort_unstable_by_key(|node| node.0);
        untold.dedup();
        Ok(untold)
    }

    /// Error of a member whose node did not answer.
    fn silent(&self, survey: &Survey, node: NodeId) -> StoreError {
        let error = survey.found.get(node.0 as usize).and_then(|found| found.as_ref().err());
        StoreError::Fabric(error.cloned().unwrap_or(FabricError::NoSuchNode(node)))
    }
}

/// Requests a decision at the first member, and returns the state that holds.
///
/// # Errors
/// The first member did not answer, or has lost its memory.
async fn decide<F: Fabric + Clock>(
    fabric: &F,
    node: NodeId,
    name: &str,
    attempt: Attempt,
    decision: Decision,
    incarnation: u64,
) -> Result<MemberState, StoreError> {
    let request = Ask::Decide { name: name.to_owned(), attempt, decision };
    match ask(fabric, node, &request).await? {
        Answer::Decided(Decided { state: MemberState::Prepared, .. }) => Err(not_understood(node)),
        Answer::Decided(decided) if decided.incarnation == incarnation => Ok(decided.state),
        // The items of a store that is being created are lost with any member.
        Answer::Decided(_) => {
            Err(StoreError::MemoryLost { name: name.to_owned(), member: 0, node, loss: Loss::Items })
        }
        _ => Err(not_understood(node)),
    }
}

/// Tells nodes of a decision, at the same time. Returns the nodes that did not answer.
async fn tell_all<F: Fabric + Clock>(
    fabric: &F,
    name: &str,
    attempt: Attempt,
    decision: Decision,
    nodes: &[NodeId],
) -> Vec<NodeId> {
    let request = &Ask::Decide { name: name.to_owned(), attempt, decision };
    let told = all(nodes.iter().map(|node| async move {
        for tell in 0..TELLS {
            if tell > 0 {
                fabric.sleep(PAUSE * (1 << tell)).await;
            }
            if let Ok(Answer::Decided(Decided { .. })) = raw_ask(fabric, *node, request).await {
                return None;
            }
        }
        Some(*node)
    }))
    .await;
    told.into_iter().flatten().collect()
}

async fn ask<F: Fabric>(fabric: &F, node: NodeId, request: &Ask) -> Result<Answer, StoreError> {
    raw_ask(fabric, node, request).await.map_err(|error| match error {
        FabricError::Refused(reason) => StoreError::Gone(reason),
        other => StoreError::Fabric(other),
    })
}

async fn raw_ask<F: Fabric>(fabric: &F, node: NodeId, request: &Ask) -> Result<Answer, FabricError> {
    let answer = crate::ask::ask(fabric, node, request).await?;
    answer.ok_or_else(|| FabricError::Refused(misunderstood(node)))
}

/// Asks a node for its store called `name`.
async fn find<F: Fabric>(fabric: &F, node: NodeId, name: &str) -> Result<Found, StoreError> {
    understood(node, name, raw_ask(fabric, node, &Ask::FindStore { name: name.to_owned() }).await)
}

/// Checks a node's answer to an [`Ask::FindStore`]. A node may answer anything.
fn understood(node: NodeId, name: &str, answer: Result<Answer, FabricError>) -> Result<Found, StoreError> {
    let found = match answer {
        Ok(Answer::Found(found)) => found,
        Ok(_) => return Err(not_understood(node)),
        Err(FabricError::Refused(reason)) => return Err(StoreError::Gone(reason)),
        Err(error) => return Err(StoreError::Fabric(error)),
    };
    let is_sound = found.store.as_ref().is_none_or(|store| {
        let membership = store.membership.as_ref();
        store.name == name
            && store.incarnation == found.incarnation
            && membership.is_none_or(|membership| membership.check(found.incarnation).is_ok())
    });
    let members =
        found.store.as_ref().and_then(|store| store.membership.as_ref()).map_or(0, |of| of.members.len());
    let is_sound = is_sound
        && found
            .accepted
            .as_ref()
            .is_none_or(|accepted| accepted.check().is_ok() && accepted.members.len() == members);
    if is_sound { Ok(found) } else { Err(not_understood(node)) }
}

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

fn misunderstood(node: NodeId) -> String {
    format!(
        "the answer of node {} about a store is not understood: use the same release on all sides",
        node.0
    )
}

fn not_understood(node: NodeId) -> StoreError {
    StoreError::Gone(misunderstood(node))
}

/// Runs futures at the same time and returns their outputs, in order.
pub(crate) async fn all<T: Unpin>(futures: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    wait_for(futures, |_| false).await.into_iter().flatten().collect()
}

/// Runs futures at the same time until all have completed, or the outputs so far are enough. Returns the outputs, in
/// order, and drops the other futures, which have no output.
pub(crate) async fn wait_for<T: Unpin>(
    futures: impl Iterator<Item = impl Future<Output = T>>,
    is_enough: impl Fn(&[Option<T>]) -> bool,
) -> Vec<Option<T>> {
    let mut running: Vec<Option<Pin<Box<_>>>> = futures.map(|future| Some(Box::pin(future))).collect();
    let mut outputs: Vec<Option<T>> = running.iter().map(|_| None).collect();
    std::future::poll_fn(move |cx| {
        for (future, output) in running.iter_mut().zip(&mut outputs) {
            if let Some(running) = future
                && let Poll::Ready(value) = running.as_mut().poll(cx)
            {
                (*future, *output) = (None, Some(value));
            }
        }
        if running.iter().all(Option::is_none) || is_enough(&outputs) {
            return Poll::Ready(std::mem::take(&mut outputs));
        }
        Poll::Pending
    })
    .await
}
