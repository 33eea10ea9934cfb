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
//! Invariant: no key of a member that is not COMMITTED is given to any client.
//! Invariant: members of two attempts are never in one list.
//! Invariant: a member that has lost its memory is an error of its own, never a missing store.
//! Invariant: a member counts as lost only if the node that held it has another memory, or if all nodes have answered.

use crate::mutants;
use crate::registry::named;
use crate::store::{Member, Members, StoreError, fetch};
use crate::system::{Nodes, Sizing};
use farside_remote::arena::SEGMENT_SIZE;
use farside_remote::clock::Clock;
use farside_remote::control::{
    Answer, Ask, Attempt, Decided, Decision, Found, MEMBERS_MAX, MemberId, MemberState, Membership, Store,
};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Fabric, FabricError, NodeId};
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
    /// Bytes of memory of the whole store.
    pub quota: u64,
    /// Number of members: the first nodes of the pool.
    pub members: usize,
}

impl New {
    /// Share of the quota and of the items that each member gets. A member has space for 4 standard deviations more
    /// items than the mean, since hashing divides keys unevenly.
    fn share(&self) -> (Sizing, u64) {
        let count = self.members as u64;
        if count < 2 {
            return (self.sizing, self.quota);
        }
        let uneven = |items: u64| {
            let mean = items as f64 / count as f64;
            let deviation = (mean * (1.0 - 1.0 / count as f64)).sqrt();
            ((mean + 4.0 * deviation).ceil() as u64).min(items)
        };
        // Without collisions, each number needs a slot at the member that its hash selects, so at any member.
        let items =
            self.sizing.items.map(|items| if self.sizing.collision_free { items } else { uneven(items) });
        let quota = self.quota.div_ceil(count).next_multiple_of(SEGMENT_SIZE);
        (Sizing { items, ..self.sizing }, quota)
    }
}

/// Outcome of [`settle`] for an unfinished creation or drop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settled {
    /// Name of the store.
    pub name: String,
    /// Whether the store exists now. If not, its memory was freed.
    pub is_committed: bool,
}

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
    for round in 0..ROUNDS {
        if round > 0 {
            fabric.sleep(PAUSE * (1 << round)).await;
        }
        let survey = Survey::of(fabric, nodes, name).await?;
        match survey.settle(fabric, Unfinished::Commit).await? {
            Standing::Here(group) => match group.opened(fabric, &survey).await? {
                Ok(members) => return Ok(members),
                Err(changed) => error = changed,
            },
            Standing::Alone(node) => {
                let store = fetch(fabric, node, name).await?;
                // The store may have been dropped, and one with several members created, since the survey.
                if store.membership.is_none() {
                    return Ok(Members::one(node, store));
                }
            }
            Standing::Absent => return Err(survey.absent()),
            Standing::Changed => {}
            Standing::Undecided => error = StoreError::BeingCreated { name: name.to_owned() },
        }
    }
    Err(error)
}

/// Creates a store over the first [`New::members`] nodes of a pool of `nodes` nodes. `attempt` is random. Returns the
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
    let New { name, kind, members, .. } = new;
    check_distribution(new, nodes)?;
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
    let chosen: Vec<NodeId> = (0..*members as u32).map(NodeId).collect();
    if let [node] = chosen[..] {
        return match ask(fabric, node, &Ask::CreateStore { name, kind, parameters, quota }).await? {
            Answer::Store(store) => Ok(vec![(node, store)]),
            _ => Err(not_understood(node)),
        };
    }
    let mut ids = Vec::new();
    for node in &chosen {
        let found =
            survey.found[node.0 as usize].as_ref().map_err(|error| StoreError::Fabric(error.clone()))?;
        ids.push(MemberId { node: node.0, incarnation: found.incarnation });
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
        match survey.settle(fabric, Unfinished::Abort).await? {
            Standing::Here(group) => return group.dropped(fabric, &survey).await,
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

/// Completes every unfinished creation and drop in a pool of `nodes` nodes. Returns what it completed. An attempt that
/// cannot be decided now, since its first member does not answer or has lost its memory, is left as it is.
///
/// # Errors
/// No node has answered.
pub async fn settle<F: Fabric + Clock>(fabric: &F, nodes: u32) -> Result<Vec<Settled>, StoreError> {
    let listed = all((0..nodes).map(|node| async move {
        match ask(fabric, NodeId(node), &Ask::ListStores).await? {
            Answer::Stores(stores) => Ok(stores),
            _ => Err(not_understood(NodeId(node))),
        }
    }))
    .await;
    if listed.iter().all(Result::is_err) {
        return Err(listed.into_iter().find_map(Result::err).unwrap_or_else(|| not_understood(NodeId(0))));
    }
    let stores = listed.into_iter().flatten().flatten();
    let names: BTreeSet<String> =
        stores.filter(|store| store.membership.is_some()).map(|store| store.name).collect();
    let mut settled = Vec::new();
    for name in names {
        let mut was_unfinished = false;
        for round in 0..ROUNDS {
            if round > 0 {
                fabric.sleep(PAUSE * (1 << round)).await;
            }
            let survey = match Survey::of(fabric, nodes, &name).await {
                Ok(survey) => survey,
                Err(error @ StoreError::Fabric(_)) => return Err(error),
                // A node refuses to answer about this name.
                Err(_) => break,
            };
            match survey.settle(fabric, Unfinished::Decide).await {
                Ok(Standing::Changed) => was_unfinished = true,
                Ok(Standing::Undecided) => {}
                Ok(Standing::Here(_) | Standing::Alone(_)) if was_unfinished => {
                    settled.push(Settled { name, is_committed: true });
                    break;
                }
                Ok(Standing::Absent) if was_unfinished => {
                    settled.push(Settled { name, is_committed: false });
                    break;
                }
                _ => break,
            }
        }
    }
    Ok(settled)
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
        Member { node, store } => (*node, store.is_err()),
    };
    let Store { name, membership, .. } = members.store();
    let Some(of) = membership else {
        return Ok(Members::one(node, fetch(fabric, node, name).await?));
    };
    let lost = |node| StoreError::MemoryLost { name: name.clone(), member: index as u32, node };
    let dropped = || StoreError::Gone(format!("store '{name}' was dropped: open another"));
    let is_same = |store: &Store| {
        let own = store.membership.as_ref();
        own.is_some_and(|own| {
            own.attempt == of.attempt && own.members == of.members && own.index as usize == index
        })
    };
    let incarnation = of.members[index].incarnation;
    let mut found = find(fabric, node, name).await?;
    if found.incarnation != incarnation && is_guess {
        // The node did not answer when the store was opened, so it may be another one than the member's.
        let survey = Survey::ask(fabric, members.nodes(), name).await?;
        let group = survey.group(of);
        match group.places[index] {
            Place::Holds(holder, _) => node = holder,
            Place::Lacks(_) => return Err(dropped()),
            Place::Silent(silent) => return Err(group.silent(&survey, silent)),
            Place::Lost(_) if mutants::WIPED_MEMBER_ABSENT.is_on() => return Err(dropped()),
            Place::Lost(node) => return Err(lost(node)),
            Place::Elsewhere => return Err(group.too_few(&survey)),
        }
        found = find(fabric, node, name).await?;
    }
    if found.incarnation != incarnation && !mutants::WIPED_MEMBER_ABSENT.is_on() {
        return Err(lost(node));
    }
    let held = found.store.filter(is_same).ok_or_else(dropped)?;
    if held.is_prepared() {
        let decision = Decision::Commit;
        ask(fabric, node, &Ask::Decide { name: name.clone(), attempt: of.attempt, decision }).await?;
    }
    let store = fetch(fabric, node, name).await?;
    if is_same(&store) { Ok(Members::part(node, store)) } else { Err(dropped()) }
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
    if *members > 1 && named(kind).is_some_and(|system| system.nodes == Nodes::One) {
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
    members: Vec<MemberId>,
    /// Node and state of each member, by index.
    places: Vec<Place>,
}

/// What is known about a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The node holds the member in this state.
    Holds(NodeId, MemberState),
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
            Place::Holds(node, _) => Some(*node),
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
        let request = Ask::FindStore { name: name.to_owned() };
        let answers = all((0..nodes).map(|node| raw_ask(fabric, NodeId(node), &request))).await;
        let mut survey =
            Survey { name: name.to_owned(), found: Vec::new(), groups: Vec::new(), is_moving: false };
        for (node, answer) in (0..).map(NodeId).zip(answers) {
            let found = match understood(node, name, answer) {
                Err(StoreError::Fabric(error)) => Err(error.map_ran(|_| Ran::No)),
                understood => Ok(understood?),
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
            if *lists.entry(membership.attempt).or_insert(&membership.members) != &membership.members {
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
            if groups.iter().any(|group| group.is(membership)) {
                continue;
            }
            let group = self.group(membership);
            let is_lacking = group.places.iter().any(|place| matches!(place, Place::Lacks(_)));
            let is_committed = group.states().any(|state| state == MemberState::Committed);
            let is_seen = before.is_none_or(|before| {
                before
                    .memberships()
                    .any(|seen| group.is(seen) && (!is_committed || seen.state == MemberState::Committed))
            });
            is_moving |= is_lacking && !is_seen;
            groups.push(group);
        }
        (self.groups, self.is_moving) = (groups, is_moving);
        self
    }

    fn memberships(&self) -> impl Iterator<Item = &Membership> {
        self.found.iter().flatten().filter_map(|found| found.store.as_ref()?.membership.as_ref())
    }

    /// Finds the places of all members of an attempt.
    fn group(&self, of: &Membership) -> Group {
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
                let is_held = |held: &&Membership| held.attempt == of.attempt && held.members == of.members;
                return match held.filter(is_held) {
                    Some(held) => Place::Holds(node, held.state),
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
        Group { attempt: of.attempt, members: of.members.clone(), places }
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
        self.attempt == membership.attempt && self.members == membership.members
    }

    fn states(&self) -> impl Iterator<Item = MemberState> {
        self.places.iter().filter_map(|place| match place {
            Place::Holds(_, state) => Some(*state),
            _ => None,
        })
    }

    /// Nodes that hold a member in this state.
    fn holders(&self, in_state: Option<MemberState>) -> Vec<NodeId> {
        let held = self.places.iter().filter_map(|place| match place {
            Place::Holds(node, state) if in_state.is_none_or(|wanted| wanted == *state) => Some(*node),
            _ => None,
        });
        held.collect()
    }

    fn lost(&self, survey: &Survey, member: usize, node: NodeId) -> StoreError {
        StoreError::MemoryLost { name: survey.name.clone(), member: member as u32, node }
    }

    async fn settle<F: Fabric + Clock>(
        &self,
        fabric: &F,
        survey: &Survey,
        unfinished: Unfinished,
    ) -> Result<Standing<'_>, StoreError> {
        let name = &survey.name;
        let is_everywhere = self.states().count() == self.places.len();
        let has_committed = self.states().any(|state| state == MemberState::Committed);
        let state = match self.places[0] {
            Place::Holds(node, MemberState::Prepared) => {
                let decision = match unfinished {
                    Unfinished::Abort => Decision::Abort,
                    _ if is_everywhere => Decision::Commit,
                    Unfinished::Decide => Decision::Abort,
                    Unfinished::Commit => return Ok(Standing::Undecided),
                };
                decide(fabric, node, name, self.attempt, decision, self.members[0].incarnation).await?;
                return Ok(Standing::Changed);
            }
            Place::Holds(_, state) => state,
            Place::Lacks(_) => MemberState::Aborted,
            // An attempt that is committed anywhere was prepared everywhere. A living member that lacks it now was told
            // that it was dropped.
            _ if has_committed && self.places.iter().any(|place| matches!(place, Place::Lacks(_))) => {
                MemberState::Aborted
            }
            Place::Silent(_) | Place::Lost(_) | Place::Elsewhere if has_committed => MemberState::Committed,
            Place::Lost(_) if mutants::WIPED_MEMBER_ABSENT.is_on() => return Ok(Standing::Absent),
            // The first member may have committed the attempt, and lost that decision with data. Only a drop forgets
            // it.
            Place::Lost(_) | Place::Elsewhere if unfinished == Unfinished::Abort => {
                return Ok(Standing::Here(self));
            }
            Place::Lost(node) => return Err(self.lost(survey, 0, node)),
            Place::Silent(node) => return Err(self.silent(survey, node)),
            Place::Elsewhere => return Err(self.too_few(survey)),
        };
        let (decision, uninformed) = match state {
            MemberState::Committed => (Decision::Commit, self.holders(Some(MemberState::Prepared))),
            _ => (Decision::Abort, self.holders(None)),
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

    fn too_few(&self, survey: &Survey) -> StoreError {
        StoreError::Gone(format!(
            "store '{}' has {} members, and only {} of their nodes are in the pool: name all of its nodes in --pool",
            survey.name,
            self.places.len(),
            self.states().count()
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
        let opened = all(self.places.iter().enumerate().map(|(index, place)| async move {
            let (node, store) = match *place {
                Place::Holds(node, _) => (node, fetch(fabric, node, &survey.name).await),
                Place::Lacks(node) | Place::Lost(node) if mutants::WIPED_MEMBER_ABSENT.is_on() => {
                    (node, Err(StoreError::Gone(format!("there is no store '{}'", survey.name))))
                }
                Place::Lacks(node) | Place::Lost(node) => (node, Err(self.lost(survey, index, node))),
                Place::Silent(node) => (node, Err(self.silent(survey, node))),
                Place::Elsewhere => (NodeId(0), Err(self.too_few(survey))),
            };
            Member { node, store }
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
    ) -> Result<Vec<NodeId>, StoreError> {
        match self.places[0] {
            Place::Holds(node, _) => {
                let incarnation = self.members[0].incarnation;
                decide(fabric, node, &survey.name, self.attempt, Decision::Drop, incarnation).await?;
            }
            Place::Silent(node) => return Err(self.silent(survey, node)),
            // Nobody can decide any more.
            Place::Lacks(_) | Place::Lost(_) | Place::Elsewhere => {}
        }
        let others: Vec<NodeId> = self.places[1..].iter().filter_map(Place::holder).collect();
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
        Answer::Decided(_) => Err(StoreError::MemoryLost { name: name.to_owned(), member: 0, node }),
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
    let request = serde_json::to_vec(request).expect("plain data");
    let mut answer = Vec::new();
    fabric.call(node, ServiceId::NODE, &request, &mut answer).await?;
    serde_json::from_slice(&answer).map_err(|_| FabricError::Refused(misunderstood(node)))
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
    let mut running: Vec<(Option<Pin<Box<_>>>, Option<T>)> =
        futures.map(|future| (Some(Box::pin(future)), None)).collect();
    std::future::poll_fn(move |cx| {
        let mut is_done = true;
        for (future, output) in &mut running {
            if let Some(running) = future {
                match running.as_mut().poll(cx) {
                    Poll::Ready(value) => (*future, *output) = (None, Some(value)),
                    Poll::Pending => is_done = false,
                }
            }
        }
        if is_done {
            return Poll::Ready(running.iter_mut().filter_map(|(_, output)| output.take()).collect());
        }
        Poll::Pending
    })
    .await
}
