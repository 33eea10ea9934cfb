//! Tests of PRISM-KV while its table is rebuilt step by step. `support/stepped` has the scenarios.

use crate::support::stepped;

macro_rules! stories {
    ($($name:ident: $case:ident;)*) => {$(
        #[test]
        fn $name() {
            stepped::$case();
        }
    )*};
}

stories! {
    every_step_among_operations_of_clients_with_any_catalog: every_step_among_operations;
    a_new_key_is_seen_by_a_client_of_the_former_table: a_new_key_is_seen;
    a_frozen_slot_is_waited_for_and_moved_by_the_next_node: a_frozen_slot_is_waited_for;
    a_version_from_before_a_delete_never_matches: a_version_of_an_earlier_life;
    a_table_is_kept_while_a_chain_may_access_it: a_table_stays;
    keys_without_a_place_move_to_a_further_table: no_place;
    keys_that_collide_in_two_tables_move_to_the_third: chosen_keys;
    keys_without_a_place_can_be_deleted_without_free_memory: no_place_nor_memory;
    a_put_succeeds_after_its_full_table_was_replaced: a_full_path;
}
