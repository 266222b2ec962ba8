/* Counts the instructions that a guest executes, in user mode and in kernel mode apart.
 *
 * A guest program marks a point with the instruction "xchg %bx,%bx" (66 87 db), which changes nothing
 * and which no compiler makes: the plugin then prints the two counts so far to QEMU's standard error,
 * as "count: USER KERNEL". Which mode it is, the address says: the kernel has the upper half.
 *
 * The interface is declared here, as far as it is used, because distributions do not package QEMU's
 * header. It is version 1, which QEMU 4.2 to 8.2 have; a later QEMU refuses the plugin. */
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))

struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS };

void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*callback)(uint64_t id, struct qemu_plugin_tb *tb));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, enum qemu_plugin_op op, void *at, uint64_t add);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *instruction,
                                            void (*callback)(unsigned int cpu, void *data),
                                            enum qemu_plugin_cb_flags flags, void *data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *instruction);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *instruction);

EXPORT int qemu_plugin_version = 1;

/* User, kernel. One thread runs all processors of the guest (-accel tcg,thread=single). */
static uint64_t counts[2];

static void marked(unsigned int cpu, void *data)
{
    (void)cpu;
    (void)data;
    fprintf(stderr, "count: %" PRIu64 " %" PRIu64 "\n", counts[0], counts[1]);
    fflush(stderr);
}

static int is_mark(const struct qemu_plugin_insn *instruction)
{
    const uint8_t *bytes = qemu_plugin_insn_data(instruction);
    return qemu_plugin_insn_size(instruction) == 3 && bytes[0] == 0x66 && bytes[1] == 0x87 && bytes[2] == 0xdb;
}

static void translated(uint64_t id, struct qemu_plugin_tb *tb)
{
    size_t instructions = qemu_plugin_tb_n_insns(tb);
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, QEMU_PLUGIN_INLINE_ADD_U64,
                                             &counts[qemu_plugin_tb_vaddr(tb) >> 63], instructions);
    for (size_t index = 0; index < instructions; index++) {
        struct qemu_plugin_insn *instruction = qemu_plugin_tb_get_insn(tb, index);
        if (is_mark(instruction))
            qemu_plugin_register_vcpu_insn_exec_cb(instruction, marked, QEMU_PLUGIN_CB_NO_REGS, NULL);
    }
}

EXPORT int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv)
{
    (void)info;
    (void)argc;
    (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    return 0;
}
