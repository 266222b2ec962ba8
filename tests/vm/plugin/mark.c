/* Marks a point for count.c, and does nothing else. Made without a C library, to be small. */
void _start(void)
{
    __asm__ volatile("xchg %bx,%bx\n\tmov $60,%eax\n\txor %edi,%edi\n\tsyscall");
    __builtin_unreachable();
}
