//! Surveys of a pool: the answers of all nodes about a name, the attempts to create a store of that name, and the
//! places of their members. The nodes answer at different times, so a survey shows no single moment.
//!
//! Invariant: an attempt is aborted only by the state at its first member, or after that member's loss by a drop.
//! Invariant: the absence of an attempt at a node is known only from an answer to a question that was asked after a
//! member of the attempt was seen.

use super::create::Placement;
use super::requests::{decide, not_understood, raw_ask, tell_all, understood};
use super::{MemberId, WithoutFirst, all, may_be_replaced, wait_for};
use crate::mutants;
use crate::store::{Loss, Member, Members, StoreError, fetch};
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Attempt, Decision, Found, MemberState, Membership, Store};
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, FabricError, NodeId};
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use std::collections::BTreeMap;

/// Treatment of an attempt that is not decided.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unfinished {
    /// Commits the attempt if it is PREPARED at all members, and otherwise leaves it to its creator.
    Commit,
    /// Commits the attempt if it is PREPARED at all members, and otherwise aborts it.
    Decide,
    /// Aborts the attempt.
    Abort,
    /// Aborts the attempt, also if the first member's node does not answer or is not in the pool.
    Forget,
}

/// State of a name in a pool.
pub(super) enum Standing<'a> {
    /// A committed store with several members.
    Here(&'a Group),
    /// A store on one node.
    Alone(NodeId),
    /// No node that has answered has a store of this name.
    Absent,
    /// This call has decided an attempt, or told a member of a decision. The caller makes another survey.
    Changed,
    /// Another client is creating the store.
    Undecided,
}

/// Responses of all nodes about a name.
pub(super) struct Survey {
    pub(super) name: String,
    pub(super) found: Vec<Result<Found, FabricError>>,
    pub(super) groups: Vec<Group>,
    /// Whether an attempt was too new to be judged.
    is_moving: bool,
}

/// Members of one attempt that were found.
pub(super) struct Group {
    pub(super) attempt: Attempt,
    /// The current configuration, and its members.
    pub(super) configuration: u64,
    pub(super) members: Vec<MemberId>,
    /// Node and state of each member, by index.
    pub(super) places: Vec<Place>,
    /// Nodes with other members of the attempt, which were replaced or have not joined.
    pub(super) others: Vec<(NodeId, Membership)>,
    /// All nodes with members of the attempt, and what they hold.
    pub(super) held: Vec<(NodeId, Membership)>,
    /// Whether members may be replaced.
    are_replaceable: bool,
}

/// Known place and state of a member.
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
    pub(super) fn holder(&self) -> Option<NodeId> {
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
    pub(super) async fn of<F: Fabric>(fabric: &F, nodes: u32, name: &str) -> Result<Survey, StoreError> {
        let before = Survey::ask(fabric, nodes, name).await?;
        if before.memberships().next().is_none() || mutants::ABSENCE_SEEN_TOO_EARLY.is_on() {
            return Ok(before.grouped(None));
        }
        Ok(Survey::ask(fabric, nodes, name).await?.grouped(Some(&before)))
    }

    pub(super) async fn ask<F: Fabric>(fabric: &F, nodes: u32, name: &str) -> Result<Survey, StoreError> {
        Survey::ask_until(fabric, nodes, name, |_| false).await
    }

    /// Asks all nodes about a member of a configuration, until a majority of the members of a higher one have answered
    /// that they serve it. A node that does not answer then delays no client.
    pub(super) async fn ask_for_next<F: Fabric>(
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
            let may_be_replaced = group.are_replaceable && group.is_begun() && !was_lacking();
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
    pub(super) fn chosen(&self, members: usize, at: Placement<'_>) -> Result<Vec<MemberId>, StoreError> {
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

    pub(super) fn memberships(&self) -> impl Iterator<Item = &Membership> {
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
    pub(super) fn left(&self, of: &Membership) -> Option<StoreError> {
        let current = self.current(of.attempt).filter(|current| current.state != MemberState::Joining);
        match current {
            Some(current) if current.configuration > of.configuration => {
                Some(StoreError::Replaced { name: self.name.clone() })
            }
            Some(_) => None,
            None => self.found.iter().find_map(|found| found.as_ref().err()).cloned().map(StoreError::Fabric),
        }
    }

    /// Finds the places of all members of the current configuration of an attempt. That is the one of `of` if no node
    /// has answered that knows it or a later one: former members may be the only ones that answer.
    pub(super) fn group(&self, of: &Membership) -> Group {
        let is_no_former = |current: &&Membership| {
            of.state == MemberState::Joining || current.configuration >= of.configuration
        };
        let of = self.current(of.attempt).filter(is_no_former).unwrap_or(of);
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
        let are_replaceable = stores.find(of_attempt).is_some_and(|store| may_be_replaced(&store.kind));
        Group {
            attempt: of.attempt,
            configuration: of.configuration,
            members: of.members.clone(),
            places,
            others: others.collect(),
            held: nodes().filter_map(|(node, found)| Some((node, held(found.as_ref().ok()?)?))).collect(),
            are_replaceable,
        }
    }

    /// Decides on unfinished attempts as `unfinished` says, and tells members of decisions that they missed.
    pub(super) async fn settle<F: Fabric + Clock>(
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
    pub(super) fn absent(&self) -> StoreError {
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

    pub(super) fn states(&self) -> impl Iterator<Item = MemberState> {
        self.places.iter().filter_map(|place| match place {
            Place::Holds(_, state) => Some(*state),
            _ => None,
        })
    }

    /// Whether the attempt is PREPARED at its first member, and not at all members.
    pub(super) fn is_half_prepared(&self) -> bool {
        matches!(self.places[0], Place::Holds(_, MemberState::Prepared))
            && self.states().count() < self.places.len()
    }

    /// Whether a client has begun to create or drop the store and not ended.
    pub(super) fn is_unfinished(&self) -> bool {
        let is_absent = self.places.iter().any(|place| matches!(place, Place::Lacks(_)));
        is_absent || self.states().any(|state| state == MemberState::Prepared)
    }

    /// Whether a member was found that serves or has served the configuration.
    pub(super) fn has_committed(&self) -> bool {
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
    pub(super) fn holders(&self) -> Vec<NodeId> {
        let others = self.others.iter().map(|(node, _)| *node);
        self.places.iter().filter_map(Place::holder).chain(others).collect()
    }

    pub(super) fn lost(&self, survey: &Survey, member: usize, node: NodeId) -> StoreError {
        let lost = self.places.iter().filter(|place| matches!(place, Place::Lost(_))).count();
        // A description of the store is at a member that has its memory.
        let store = survey.found.iter().flatten().find_map(|found| found.store.as_ref());
        let loss = store.map_or(Loss::Items, |store| Loss::of(store, lost));
        StoreError::MemoryLost { name: survey.name.clone(), member: member as u32, node, loss }
    }

    pub(super) async fn settle<F: Fabric + Clock>(
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
            // All members were prepared before the attempt was committed at any. So a living member that lacks it now
            // has carried out a drop.
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
        if state == MemberState::Aborted && self.are_replaceable && self.is_begun() {
            // What answered may be a member that is behind, and one that was replaced since and has left. Those that
            // did not answer know.
            return match self.unasked(survey).filter(|_| unfinished != Unfinished::Forget) {
                Some(error) => Err(error),
                None => Ok(self.leave(fabric, name).await),
            };
        }
        let (decision, uninformed) = match state {
            MemberState::Committed => (Decision::Commit, self.prepared()),
            _ => (Decision::Abort, self.holders()),
        };
        let is_told = state == MemberState::Committed && mutants::HALF_CREATED_USED.is_on();
        if !uninformed.is_empty() && !is_told {
            let told = tell_all(fabric, name, self.attempt, decision, &uninformed).await;
            return Ok(match (told.silent.is_empty(), state) {
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

    /// Error of a member that may hold the attempt, and has not answered or is not in the pool, if there is one.
    fn unasked(&self, survey: &Survey) -> Option<StoreError> {
        self.places.iter().find_map(|place| match place {
            Place::Silent(node) => Some(self.silent(survey, *node)),
            Place::Elsewhere => Some(self.too_few(survey)),
            _ => None,
        })
    }

    /// Error of a group of which only newcomers were found.
    fn unknown(&self, survey: &Survey) -> StoreError {
        let lost = || {
            self.places.iter().enumerate().find_map(|(member, place)| match place {
                Place::Lost(node) => Some(self.lost(survey, member, *node)),
                _ => None,
            })
        };
        self.unasked(survey).or_else(lost).unwrap_or_else(|| self.too_few(survey))
    }

    pub(super) fn too_few(&self, survey: &Survey) -> StoreError {
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
    pub(super) async fn opened<F: Fabric>(
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
    pub(super) async fn dropped<F: Fabric + Clock>(
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
        let mut untold = tell_all(fabric, &survey.name, self.attempt, Decision::Drop, &others).await.silent;
        untold.extend(self.places.iter().filter_map(|place| match place {
            Place::Silent(node) => Some(*node),
            _ => None,
        }));
        untold.sort_unstable_by_key(|node| node.0);
        untold.dedup();
        Ok(untold)
    }

    /// Error of a member whose node did not answer.
    pub(super) fn silent(&self, survey: &Survey, node: NodeId) -> StoreError {
        let error = survey.found.get(node.0 as usize).and_then(|found| found.as_ref().err());
        StoreError::Fabric(error.cloned().unwrap_or(FabricError::NoSuchNode(node)))
    }
}
